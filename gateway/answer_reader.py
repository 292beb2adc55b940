"""What an answer says: its thought, its speech and its calls, told apart as the text comes."""

from __future__ import annotations

from typing import NamedTuple

from gateway.dialects import Dialect
from gateway.messages import CallDelta, Toolbox


class Heard(NamedTuple):
    """New pieces of an answer."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


NOTHING = Heard()


class AnswerReader:
    """Reads one choice.

    Args:
        dialect: How the model says these things; None = everything is speech.
        toolbox: What it may call; None = nothing.
        thinking: Whether the prompt has opened a thought.
        aloud: Whether thoughts are told.
    """

    def __init__(
        self,
        dialect: Dialect | None = None,
        toolbox: Toolbox | None = None,
        *,
        thinking: bool = False,
        aloud: bool = True,
    ) -> None:
        self._aloud = aloud
        self._thoughts = dialect.thoughts(open=thinking) if dialect else None
        self._turn = dialect.turn(toolbox) if dialect else None
        self._calls_begun = 0
        self.is_plain = self._thoughts is None and self._turn is None
        """Whether all that it reads is speech, and stays as it is."""

    @property
    def has_called(self) -> bool:
        """Whether it has called anything."""
        return self._calls_begun > 0

    @property
    def over(self) -> bool:
        """Whether it may say no more: one call was all it had."""
        return self._turn is not None and self._turn.over

    def push(self, text: str) -> Heard:
        """Takes more text; returns what is final."""
        if self.is_plain:
            return Heard(text)
        reasoning = ""
        if self._thoughts is not None:
            reasoning, text = self._thoughts.push(text)
        return self._hear(reasoning, text)

    def flush(self) -> Heard:
        """The rest, at the end of the answer."""
        heard = NOTHING
        if self._thoughts is not None:
            heard = self._hear(*self._thoughts.flush())
        if self._turn is None:
            return heard
        last = self._turn.flush()
        calls = heard.calls + last.calls
        self._count(calls)
        return Heard(heard.text + last.text, heard.reasoning, calls)

    def _hear(self, reasoning: str, text: str) -> Heard:
        reasoning = reasoning if self._aloud else ""
        if self._turn is None:
            return Heard(text, reasoning)
        said = self._turn.push(text)
        self._count(said.calls)
        return Heard(said.text, reasoning, said.calls)

    def _count(self, calls: tuple[CallDelta, ...]) -> None:
        self._calls_begun += sum(bool(call.id) for call in calls)
