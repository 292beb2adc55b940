"""How much of what one step may take: limits, page arithmetic, and the cut of a prefill chunk."""

from __future__ import annotations

from dataclasses import dataclass

from chiasm.plan import Span
from decoder_svc.embeddings.events import Demand
from decoder_svc.embeddings.receiver import EmbeddingReceiver
from decoder_svc.engine.messages import EmbedSpan
from decoder_svc.engine.request import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The scheduler's settings."""

    max_running: int
    """Sequences in the batch at once."""
    chunk_tokens: int
    """Prompt tokens of one step, over all requests."""
    block_size: int
    lookahead_chunks: int = 2
    """Rows are asked for this many chunks ahead, so that a transfer hides behind a step."""

    depth: int = 1
    """Pipeline stages: micro-batches that the running sequences are spread over."""
    ahead: bool = False
    """Whether a sequence is scheduled again before the token it drew last is known here."""
    most_rows: int = 0
    """Up to so many decoding sequences of a step are told in columns."""

    mixed_tokens: int = 0
    """Tokens of a step that sequences also decode in, theirs included; 0 = as many as without."""
    prefill_delay: int = 0
    """Steps that prompts may wait for each other while others wait for seats: see `PromptGate`."""

    least_text: int = 1
    """Fewer tokens of text before a row that has not landed are left for the step with that row."""

    def share(self, num_sequences: int) -> int:
        """Sequences of one step, so that the other stages get as many in theirs."""
        return -(-num_sequences // self.depth)

    def prompt_tokens(self, num_decodes: int) -> int:
        """Prompt tokens of a step beside so many that decode: a quarter of it at least."""
        if not num_decodes or not self.mixed_tokens:
            return self.chunk_tokens
        left = max(self.mixed_tokens - num_decodes, self.mixed_tokens // 4, 1)
        return min(left, self.chunk_tokens)

    def pages(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self.block_size)


@dataclass(slots=True)
class StepBudget:
    """What prefill may still take of a step."""

    tokens: int
    sequences: int


def landed_chunk(
    sequence: Sequence, length: int, receiver: EmbeddingReceiver, *, least_text: int = 1
) -> int:
    """The next chunk of at most `length` tokens, cut before the first missing row.

    A cut that leaves less than `least_text` waits for that row, if it is of text alone: rows that
    have landed must be read in any case, or the missing ones could wait for their slots.
    """
    begin, end = sequence.num_scheduled, sequence.num_scheduled + length
    request = sequence.request
    has_rows = is_cut = False
    for item, promise in request.promises.items():
        if promise.prompt_offset >= end or promise.prompt_end <= begin:
            continue
        first, last = promise.row_at(begin), promise.row_at(end)
        if first < last:
            landed = receiver.landed_until(request.request_id, item, first)
            has_rows = has_rows or landed > first
            if landed < last:
                end, is_cut = promise.index_of(landed), True
    waits = is_cut and not has_rows and end - begin < least_text
    return 0 if waits else end - begin


def embed_spans(
    sequence: Sequence, length: int, receiver: EmbeddingReceiver
) -> tuple[EmbedSpan, ...]:
    """Where the rows of the next `length` tokens lie; all of them have landed."""
    request = sequence.request
    if not request.promises or sequence.num_scheduled >= len(request.prompt):
        return ()
    begin, end = sequence.num_scheduled, sequence.num_scheduled + length
    return tuple(
        EmbedSpan(index - begin, receiver.locate(request.request_id, item, rows))
        for item, promise in request.promises.items()
        for index, rows in promise.stretches(begin, end)
    )


def demands_of(sequence: Sequence, length: int) -> list[Demand]:
    """The rows that the next `length` tokens stand for, item by item in prompt order.

    With none of them an empty span. Counted once for each place that the sequence gets to; `length`
    is the same every time.
    """
    begin = sequence.num_scheduled
    counted_at, demands = sequence.demands
    if counted_at == begin:
        return demands
    request, end = sequence.request, begin + length
    found = []
    for item, promise in request.promises.items():
        rows = Span(promise.row_at(begin), promise.row_at(end))
        if len(rows):
            found.append(Demand(request.request_id, item, rows))
    if not found:
        found = [Demand(request.request_id, next(iter(request.promises)), Span(0, 0))]
    sequence.demands = (begin, found)
    return found
