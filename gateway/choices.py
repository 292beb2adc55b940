"""The choices of one request: token ids in, text events out, stop strings matched."""

from __future__ import annotations

from collections.abc import Callable

from chiasm.errors import Unavailable
from chiasm.v1 import decoder_pb2
from gateway.detokenizer import Detokenizer
from gateway.messages import ChoiceDone, Delta, FinishReason, TokenLogprob

ChoiceEvent = Delta | ChoiceDone

_REASONS = {
    decoder_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    decoder_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


class Choices:
    """Detokenizes every choice; knows which have ended."""

    def __init__(self, n: int, make_detokenizer: Callable[[], Detokenizer]) -> None:
        self._detokenizers = [make_detokenizer() for _ in range(n)]
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
        self._ids[choice].extend(delta.token_ids)
        piece = self._detokenizers[choice].push(delta.token_ids)
        # Logprobs are there for every id or, when not asked for, for none.
        logprobs = tuple(
            TokenLogprob(token_id, entry.logprob, _top(entry))
            for token_id, entry in zip(delta.token_ids, delta.logprobs, strict=False)
        )
        events: list[ChoiceEvent] = [Delta(choice, piece.text, tuple(delta.token_ids), logprobs)]
        if piece.stopped:
            events.append(self._end(choice, FinishReason.STOP))
        return events

    def finish(self, finished: decoder_pb2.ChoiceFinished) -> list[ChoiceEvent]:
        """The decoder ended a choice. Raises Unavailable when it gave up on it."""
        choice = finished.choice
        if self._ended[choice]:
            return []
        reason = _REASONS.get(finished.reason)
        if reason is None:
            raise Unavailable("the decoder gave up on the request")
        detokenizer = self._detokenizers[choice]
        rest = detokenizer.flush()
        events: list[ChoiceEvent] = [Delta(choice, rest)] if rest else []
        events.append(self._end(choice, FinishReason.STOP if detokenizer.stopped else reason))
        return events

    def _end(self, choice: int, reason: FinishReason) -> ChoiceDone:
        self._ended[choice] = True
        return ChoiceDone(choice, reason)


def _top(entry: decoder_pb2.TokenLogprobs) -> tuple[tuple[int, float], ...]:
    return tuple(zip(entry.top_ids, entry.top_logprobs, strict=True))
