"""What a format of tool calls is, and how text is read that may hold some. Text in, pieces out.

A reader says only what is final: it holds back what may still become a tag.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gateway.messages import CallDelta, Tool

Quote = Callable[[str], str]
"""A tag as a grammar names it: by its token's id if it is one, else spelled."""


@dataclass(frozen=True, slots=True)
class Said:
    """Text of the answer and calls, in this order."""

    text: str = ""
    calls: tuple[CallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class CallRule:
    """One tool's call as a grammar: an expression, and rules that it uses."""

    expression: str
    rules: tuple[str, ...] = ()


class CallReader(ABC):
    """Reads one call, between its tags.

    Args:
        index: The call's among those of its answer.
        call_id: Its id.
    """

    def __init__(self, index: int, call_id: str) -> None:
        self.index, self.call_id = index, call_id
        self.begun = False
        """Whether anything of it has been said."""

    @abstractmethod
    def push(self, text: str) -> tuple[CallDelta, ...]:
        """Takes more of what is between the tags; returns what is final."""

    @abstractmethod
    def finish(self) -> tuple[CallDelta, ...]:
        """The rest, at the closing tag or the answer's end. Still not begun: it was no call."""

    def begin(self, name: str) -> CallDelta:
        """The call's first word."""
        self.begun = True
        return CallDelta(self.index, "", self.call_id, name)


class ToolFormat(ABC):
    """One way of writing calls. Stateless."""

    opening: ClassVar[str]
    closing: ClassVar[str]
    marker: ClassVar[str]
    """What a chat template holds that teaches this format."""
    tags: ClassVar[tuple[str, ...]]
    """All of its tags: they are kept as text, should they be special tokens."""

    @abstractmethod
    def reader(self, index: int, call_id: str, tools: Mapping[str, Tool]) -> CallReader:
        """Reads one call."""

    @abstractmethod
    def rule(self, tool: Tool, prefix: str, quote: Quote) -> CallRule:
        """One call of a tool, tags included; `prefix` makes the names of its rules unique."""


class TurnReader:
    """Reads an answer that may hold calls.

    Args:
        form: The format.
        tools: Those that may be called, by name.
        make_id: Makes ids of calls.
        single: Whether one call is all that may be said: what follows it is dropped.
    """

    def __init__(
        self,
        form: ToolFormat,
        tools: Mapping[str, Tool],
        make_id: Callable[[], str],
        *,
        single: bool = False,
    ) -> None:
        self._form = form
        self._single = single
        self._tools = tools
        self._make_id = make_id
        self._held = ""
        self._call: CallReader | None = None
        self._raw = ""  # of a call that has said nothing yet
        self.num_calls = 0
        """Calls that have ended."""

    @property
    def over(self) -> bool:
        """Whether nothing more may be said."""
        return self._single and self.num_calls > 0

    def push(self, text: str) -> Said:
        """Takes more text; returns what is final."""
        self._held += text
        out = ""
        calls: list[CallDelta] = []
        while not self.over:
            if self._call is None:
                said, opened = self._until(self._form.opening)
                # What stands between a call and the next is layout.
                out += said if said.strip() or not self.num_calls else ""
                if not opened:
                    return Said(out, tuple(calls))
                self._raw = self._form.opening
                self._call = self._form.reader(self.num_calls, self._make_id(), self._tools)
            said, closed = self._until(self._form.closing)
            self._raw += said
            calls += self._call.push(said)
            if not closed:
                return Said(out, tuple(calls))
            calls += self._call.finish()
            out += self._close(self._form.closing)
        return Said(out, tuple(calls))

    def flush(self) -> Said:
        """The rest, at the end of the answer: a call without its closing tag counts too."""
        rest, self._held = self._held, ""
        if self.over:
            return Said()
        if self._call is None:
            return Said(rest if rest.strip() or not self.num_calls else "")
        self._raw += rest
        calls = (*self._call.push(rest), *self._call.finish())
        return Said(self._close(""), calls)

    def _close(self, tag: str) -> str:
        """Ends the call; what was none is text after all."""
        assert self._call is not None
        begun, self._call = self._call.begun, None
        if not begun:
            return self._raw + tag
        self.num_calls += 1
        return ""

    def _until(self, tag: str) -> tuple[str, bool]:
        """Text before the tag, and whether the tag came; holds back what may become one."""
        at = self._held.find(tag)
        if at >= 0:
            said, self._held = self._held[:at], self._held[at + len(tag) :]
            return said, True
        keep = partial(self._held, tag)
        said, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return said, False


def partial(text: str, tag: str) -> int:
    """How many characters at the end of the text are a true beginning of the tag."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            return size
    return 0


def object_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's parameters as a schema that takes objects only."""
    return {"type": "object", **parameters}
