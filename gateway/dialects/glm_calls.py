"""Calls as GLM-4.5 and later write them: a name, then keys and values between tags.

    <tool_call>f
    <arg_key>a</arg_key>
    <arg_value>1</arg_value>
    </tool_call>

A string stands as it is, any other value as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from gateway.dialects.base import CallReader, CallRule, Quote, ToolFormat, partial
from gateway.dialects.grammar import embedded, quoted
from gateway.messages import CallDelta, Tool

_KEY, _END_KEY = "<arg_key>", "</arg_key>"
_VALUE, _END_VALUE = "<arg_value>", "</arg_value>"


class GlmFormat(ToolFormat):
    """GLM-4.5, 4.6 and their vision models."""

    opening: ClassVar[str] = "<tool_call>"
    closing: ClassVar[str] = "</tool_call>"
    marker: ClassVar[str] = _KEY
    tags: ClassVar[tuple[str, ...]] = (
        *("<tool_call>", "</tool_call>", _KEY),
        *(_END_KEY, _VALUE, _END_VALUE),
    )

    def reader(self, index: int, call_id: str, tools: Mapping[str, Tool]) -> CallReader:
        """See the base class."""
        return GlmCallReader(index, call_id, tools)

    def rule(self, tool: Tool, prefix: str, quote: Quote) -> CallRule:
        """See the base class. Arguments come in the schema's order."""
        required = tool.parameters.get("required") or ()
        parts, rules = [quote(self.opening), quoted(tool.name + "\n")], []
        for number, (key, schema) in enumerate(_properties(tool).items()):
            name = f"{prefix}_value{number}"
            pair = (
                *(quote(_KEY), quoted(key), quote(_END_KEY), quoted("\n")),
                *(quote(_VALUE), name, quote(_END_VALUE), quoted("\n")),
            )
            parts.append(" ".join(pair) if key in required else f"({' '.join(pair)})?")
            rules.append(f"{name}: {_value_rule(schema, tool.parameters)}")
        return CallRule(" ".join((*parts, quote(self.closing))), tuple(rules))


class GlmCallReader(CallReader):
    """Puts the arguments together as JSON; strings as they come, other values when whole."""

    def __init__(self, index: int, call_id: str, tools: Mapping[str, Tool]) -> None:
        super().__init__(index, call_id)
        self._tools = tools
        self._held = ""
        self._types: dict[str, Any] = {}
        self._num_pairs = 0
        self._key: str | None = None
        self._in_value = False
        self._is_text = False
        self._text_open = False

    def push(self, text: str) -> tuple[CallDelta, ...]:
        """See the base class."""
        self._held += text
        out: list[CallDelta] = []
        while self._advance(out):
            pass
        return tuple(out)

    def finish(self) -> tuple[CallDelta, ...]:
        """See the base class."""
        out: list[CallDelta] = []
        if not self.begun:
            name = self._held.strip()
            if name not in self._tools:
                return ()
            out.append(self.begin(name))
        if self._text_open:
            out.append(self._tell(_escaped(self._held) + '"'))
        elif self._in_value:
            out.append(self._tell(_as_json(self._held)))
        out.append(self._tell("}" if self._num_pairs else "{}"))
        return tuple(out)

    def _advance(self, out: list[CallDelta]) -> bool:
        """One stretch; False when more text is needed."""
        if not self.begun:
            return self._read_name(out)
        if self._in_value:
            return self._read_value(out)
        if self._key is None:
            found = self._between(_KEY, _END_KEY)
            if found is not None:
                self._key = found
            return found is not None
        at = self._held.find(_VALUE)
        if at < 0:
            return False
        self._held = self._held[at + len(_VALUE) :]
        self._in_value, self._is_text = True, self._types.get(self._key) == "string"
        lead = ", " if self._num_pairs else "{"
        self._num_pairs += 1
        out.append(self._tell(f"{lead}{json.dumps(self._key, ensure_ascii=False)}: "))
        return True

    def _read_name(self, out: list[CallDelta]) -> bool:
        ends = [at for at in (self._held.find("\n"), self._held.find(_KEY)) if at >= 0]
        if not ends or not (name := self._held[: min(ends)].strip()):
            return False
        self._held = self._held[min(ends) :]
        if name in self._tools:
            schemas = _properties(self._tools[name]).items()
            self._types = {key: schema.get("type") for key, schema in schemas}
        out.append(self.begin(name))
        return True

    def _read_value(self, out: list[CallDelta]) -> bool:
        at = self._held.find(_END_VALUE)
        if self._is_text:
            end = at if at >= 0 else len(self._held) - partial(self._held, _END_VALUE)
            opening = "" if self._text_open else '"'
            told = opening + _escaped(self._held[:end]) + ('"' if at >= 0 else "")
            self._text_open = at < 0
            if told:
                out.append(self._tell(told))
            self._held = self._held[end:]
        elif at >= 0:
            out.append(self._tell(_as_json(self._held[:at])))
            self._held = self._held[at:]
        if at < 0:
            return False
        self._held = self._held[len(_END_VALUE) :]
        self._in_value, self._key = False, None
        return True

    def _between(self, opening: str, closing: str) -> str | None:
        begin = self._held.find(opening)
        end = self._held.find(closing, begin)
        if begin < 0 or end < 0:
            return None
        found = self._held[begin + len(opening) : end]
        self._held = self._held[end + len(closing) :]
        return found.strip()

    def _tell(self, arguments: str) -> CallDelta:
        return CallDelta(self.index, arguments)


def _properties(tool: Tool) -> dict[str, dict[str, Any]]:
    found = tool.parameters.get("properties")
    if not isinstance(found, Mapping):
        return {}
    return {key: schema if isinstance(schema, dict) else {} for key, schema in found.items()}


def _value_rule(schema: dict[str, Any], parameters: Mapping[str, Any]) -> str:
    if schema.get("type") == "string":
        choices = schema.get("enum") or ([schema["const"]] if "const" in schema else ())
        if choices:
            return " | ".join(quoted(str(choice)) for choice in choices)
        return "/[^<]*/"
    shared = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    return embedded({**schema, **shared})


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(text: str) -> str:
    """A value as JSON; one that is none is a string."""
    stripped = text.strip()
    try:
        json.loads(stripped)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    return stripped
