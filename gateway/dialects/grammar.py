"""Pieces of grammars in Lark, as the decoder's library reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# Schemas inside a grammar carry the options that the decoder gives to those outside of one.
_OPTIONS = {
    "lenient": False,
    "coerce_one_of": False,
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ ]|\n((  ){0,8}|\t{0,8})",
}


def quoted(text: str) -> str:
    """Text that must stand there as it is."""
    return json.dumps(text, ensure_ascii=False)


def embedded(schema: Mapping[str, Any] | bool) -> str:
    """A value that fits a JSON schema."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return f"%json {json.dumps({**schema, 'x-guidance': _OPTIONS}, ensure_ascii=False)}"


def pattern(regex: str) -> str:
    """Text that a regular expression matches as a whole."""
    escaped, after_backslash = [], False
    for char in regex:
        if char == "\n":
            escaped.append("\\n")
        else:
            escaped.append("\\/" if char == "/" and not after_backslash else char)
        after_backslash = char == "\\" and not after_backslash
    return f"/{''.join(escaped)}/"
