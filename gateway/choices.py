"""The choices of one request: token ids in, text events out, stop strings matched."""

from __future__ import annotations

from collections.abc import Callable

from chiasm.errors import Unavailable
from chiasm.v1 import decoder_pb2
from gateway.answer_reader import NOTHING, AnswerReader, Heard
from gateway.detokenizer import Detokenizer
from gateway.messages import ChoiceDone, Delta, FinishReason, TokenLogprob

ChoiceEvent = Delta | ChoiceDone

_REASONS = {
    decoder_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    decoder_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


class Choices:
    """Detokenizes every choice; knows which have ended.

    Args:
        n: How many.
        make_detokenizer: For each.
        make_reader: For each: tells text, thoughts and calls apart.
        prompt_tokens: Of the prompt, for usage.
    """

    def __init__(
        self,
        n: int,
        make_detokenizer: Callable[[], Detokenizer],
        make_reader: Callable[[], AnswerReader] = AnswerReader,
        *,
        prompt_tokens: int = 0,
    ) -> None:
        self._prompt_tokens = prompt_tokens
        self._detokenizers = [make_detokenizer() for _ in range(n)]
        self._readers = [make_reader() for _ in range(n)]
        self._ids: list[list[int]] = [[] for _ in range(n)]
        self._ended = [False] * n
        self.overrun = 0
        """Tokens that came after a stop string had ended their choice: nobody pays for them."""

    @property
    def begun(self) -> bool:
        """Whether anything has been said of any choice."""
        return any(self._ids) or any(self._ended)

    @property
    def ended(self) -> tuple[int, ...]:
        """Choices that have ended."""
        return tuple(choice for choice, ended in enumerate(self._ended) if ended)

    def resume(self) -> list[decoder_pb2.ResumeFrom]:
        """What another decoder needs to go on; empty before the first token."""
        self.overrun = 0
        if not any(self._ids):
            return []
        return [
            decoder_pb2.ResumeFrom(choice=choice, output_ids=ids)
            for choice, ids in enumerate(self._ids)
        ]

    def push(self, delta: decoder_pb2.TokenDelta) -> list[ChoiceEvent]:
        """New ids of a choice. A ChoiceDone in the answer means: tell the decoder to stop it."""
        choice = delta.choice
        if self._ended[choice]:
            self.overrun += len(delta.token_ids)
            return []
        ids = tuple(delta.token_ids)
        self._ids[choice] += ids
        piece = self._detokenizers[choice].push(ids)
        reader = self._readers[choice]
        logprobs = _logprobs(delta) if delta.logprobs else ()
        if reader.is_plain:
            return self._told(
                Delta(choice, piece.text, ids, logprobs, prompt_tokens=self._prompt_tokens),
                over=piece.stopped,
            )
        heard = reader.push(piece.text) if piece.text else NOTHING
        said = Delta(
            choice,
            heard.text,
            ids,
            logprobs,
            heard.reasoning,
            heard.calls,
            self._prompt_tokens,
        )
        return self._told(said, over=piece.stopped or reader.over)

    def finish(self, finished: decoder_pb2.ChoiceFinished) -> list[ChoiceEvent]:
        """The decoder ended a choice. Raises Unavailable when it gave up on it."""
        choice = finished.choice
        if self._ended[choice]:
            self.overrun += finished.HasField("stop_token_id")  # drawn, and never sent as a token
            return []
        reason = _REASONS.get(finished.reason)
        if reason is None:
            raise Unavailable("the decoder gave up on the request")
        detokenizer = self._detokenizers[choice]
        heard = self._readers[choice].push(detokenizer.flush())
        return [
            *_said(choice, heard),
            *self._end(choice, FinishReason.STOP if detokenizer.stopped else reason),
        ]

    def _told(self, said: Delta, *, over: bool) -> list[ChoiceEvent]:
        return [said, *self._end(said.choice, FinishReason.STOP)] if over else [said]

    def _end(self, choice: int, reason: FinishReason) -> list[ChoiceEvent]:
        self._ended[choice] = True
        reader = self._readers[choice]
        rest = _said(choice, reader.flush())
        if reason is FinishReason.STOP and reader.has_called:
            reason = FinishReason.TOOL_CALLS
        return [*rest, ChoiceDone(choice, reason)]


def _said(choice: int, heard: Heard) -> list[ChoiceEvent]:
    if heard == NOTHING:
        return []
    return [Delta(choice, heard.text, reasoning=heard.reasoning, calls=heard.calls)]


def _logprobs(delta: decoder_pb2.TokenDelta) -> tuple[TokenLogprob, ...]:
    """There for every id or, when not asked for, for none."""
    return tuple(
        TokenLogprob(token_id, entry.logprob, _top(entry))
        for token_id, entry in zip(delta.token_ids, delta.logprobs, strict=False)
    )


def _top(entry: decoder_pb2.TokenLogprobs) -> tuple[tuple[int, float], ...]:
    return tuple(zip(entry.top_ids, entry.top_logprobs, strict=True))
