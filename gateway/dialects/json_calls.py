"""Calls as JSON objects between tags, read as they come: Hermes' format, and InternLM's.

<tool_call>
{"name": "f", "arguments": {"a": 1}}
</tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import ClassVar

from gateway.dialects.base import CallReader, CallRule, Quote, ToolFormat, object_schema
from gateway.dialects.grammar import embedded, quoted
from gateway.messages import CallDelta, Tool

_ARGUMENTS = ("arguments", "parameters")
_END = "}\n"


class HermesFormat(ToolFormat):
    """Qwen's, and of many others."""

    opening: ClassVar[str] = "<tool_call>"
    closing: ClassVar[str] = "</tool_call>"
    marker: ClassVar[str] = "<tool_call>"
    tags: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")

    def reader(self, index: int, call_id: str, tools: Mapping[str, Tool]) -> CallReader:
        """See the base class."""
        return JsonCallReader(index, call_id)

    def rule(self, tool: Tool, prefix: str, quote: Quote) -> CallRule:
        """See the base class."""
        inner, rule = _object(tool, prefix, arguments="arguments")
        return CallRule(f"{quote(self.opening)} {inner} {quote(self.closing)}", (rule,))


class InternLMFormat(ToolFormat):
    """InternLM 2 and 2.5."""

    opening: ClassVar[str] = "<|action_start|><|plugin|>"
    closing: ClassVar[str] = "<|action_end|>"
    marker: ClassVar[str] = "<|plugin|>"
    tags: ClassVar[tuple[str, ...]] = ("<|action_start|>", "<|plugin|>", "<|action_end|>")

    def reader(self, index: int, call_id: str, tools: Mapping[str, Tool]) -> CallReader:
        """See the base class."""
        return JsonCallReader(index, call_id)

    def rule(self, tool: Tool, prefix: str, quote: Quote) -> CallRule:
        """See the base class."""
        inner, rule = _object(tool, prefix, arguments="parameters")
        begin, plugin, end = map(quote, self.tags)
        return CallRule(f"{begin} {plugin} {inner} {end}", (rule,))


def _object(tool: Tool, prefix: str, *, arguments: str) -> tuple[str, str]:
    """What stands between the tags, and the rule of its arguments."""
    head = f'\n{{"name": {json.dumps(tool.name)}, "{arguments}": '
    name = f"{prefix}_arguments"
    return (
        f"{quoted(head)} {name} {quoted(_END)}",
        f"{name}: {embedded(object_schema(tool.parameters))}",
    )


class JsonCallReader(CallReader):
    """Finds the name, and passes the arguments on character by character as they were written."""

    def __init__(self, index: int, call_id: str) -> None:
        super().__init__(index, call_id)
        self._text = ""
        self._at = 0
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key: str | None = None
        self._value_at: int | None = None
        self._string_at = 0
        self._name: str | None = None
        self._arguments_at: int | None = None
        self._arguments_end: int | None = None
        self._told = 0

    def push(self, text: str) -> tuple[CallDelta, ...]:
        """See the base class."""
        self._text += text
        while self._at < len(self._text):
            self._step(self._text[self._at])
            self._at += 1
        return self._news()

    def finish(self) -> tuple[CallDelta, ...]:
        """See the base class."""
        news = self._news()
        if self.begun and self._arguments_at is None:
            return (*news, CallDelta(self.index, "{}"))
        return news

    def _news(self) -> tuple[CallDelta, ...]:
        if self._name is None:
            return ()
        out = () if self.begun else (self.begin(self._name),)
        if self._arguments_at is None:
            return out
        end = self._at if self._arguments_end is None else self._arguments_end
        begin = self._arguments_at + self._told
        if end <= begin:
            return out
        self._told += end - begin
        return (*out, CallDelta(self.index, self._text[begin:end]))

    def _step(self, char: str) -> None:
        """One character: only the members of the outermost object matter."""
        if self._in_string:
            self._step_in_string(char)
        elif char == '"':
            self._begin_value()
            self._in_string, self._string_at = True, self._at
        elif char in "{[":
            self._begin_value()
            self._depth += 1
        elif char in "}]":
            self._end_value(self._at if self._depth == 1 else self._at + 1)
            self._depth -= 1
        elif char == "," and self._depth == 1:
            self._end_value(self._at)
            self._key = None
        elif not char.isspace() and char != ":":
            self._begin_value()

    def _step_in_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            if self._depth == 1:
                self._take_string(self._text[self._string_at : self._at + 1])

    def _take_string(self, raw: str) -> None:
        try:
            value = json.loads(raw, strict=False)
        except ValueError:
            return
        if self._key is None:
            self._key = value
        elif self._key == "name" and self._name is None:
            self._name = value

    def _begin_value(self) -> None:
        if self._depth == 1 and self._key is not None and self._value_at is None:
            self._value_at = self._at
            if self._key in _ARGUMENTS and self._arguments_at is None:
                self._arguments_at = self._at

    def _end_value(self, end: int) -> None:
        """A value that is a container ends with its bracket, any other before a comma or brace."""
        ends_here = self._depth == 1 or (self._depth == 2 and end == self._at + 1)
        if not ends_here or self._value_at is None:
            return
        if self._value_at == self._arguments_at and self._arguments_end is None:
            self._arguments_end = end
        if self._depth == 1:
            self._value_at = None
