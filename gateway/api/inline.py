"""Pictures in a JSON text, taken out where they stand: a parser would copy a megabyte for nothing.

Nothing but speed depends on it: what is taken out is exactly what the text says, or stays in.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.media.data_uri import strict_base64

LEAST_CHARS = 16 << 10  # shorter ones are parsed as quickly
_MOST_LOOKED_AT = 1024  # strings that begin so; more than a request may have media
_HEAD = re.compile(rb"data:[a-zA-Z0-9.+/-]{0,64};base64,")

Lifted = Mapping[str, bytes]
"""What was taken out, by the URL that stands there now."""


def lift(raw: bytes | bytearray) -> tuple[bytes | bytearray, Lifted]:
    """The text with long data URIs replaced by short names that nobody can guess, and their data.

    A string without a backslash that is strict base64 says the same to every parser.
    """
    kept: list[bytes | memoryview] = []
    lifted: dict[str, bytes] = {}
    view, done, nonce = memoryview(raw), 0, secrets.token_hex(16)
    at, looked_at = raw.find(b'"data:'), 0
    while at >= 0 and looked_at < _MOST_LOOKED_AT:
        looked_at += 1
        end = raw.find(b'"', at + 1)
        head = _HEAD.match(raw, at + 1)
        if head is not None and end - at > LEAST_CHARS:
            data = strict_base64(view[head.end() : end])  # None where there is a backslash
            if data:
                name = f"data:;lifted,{nonce}-{len(lifted)}"
                lifted[name] = data
                kept += (view[done : at + 1], name.encode())
                done = end
        at = raw.find(b'"data:', end) if end >= 0 else -1
    if not lifted:
        return raw, lifted
    return b"".join((*kept, view[done:])), lifted


def media_urls(body: Mapping[str, Any]) -> Iterator[str]:
    """The URLs of media in a chat body, before it has been validated."""
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            url = part.get(kind) if kind in ("image_url", "video_url") else None
            url = url.get("url") if isinstance(url, dict) else url
            if isinstance(url, str):
                yield url
