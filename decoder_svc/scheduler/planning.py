"""Writes down what was chosen for a step, for ranks to compute."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from decoder_svc.embeddings.receiver import EmbeddingReceiver
from decoder_svc.engine.counts import Ints
from decoder_svc.engine.messages import PlannedSequence, StepPlan, StepTokens
from decoder_svc.engine.request import Sequence
from decoder_svc.scheduler.budget import embed_spans
from decoder_svc.scheduler.cohort import Cohort
from decoder_svc.scheduler.seats import Seats


@dataclass(slots=True)
class Chosen:
    """Whom a step is put together of."""

    decodes: Ints
    """Seats of those that compute the token they drew last, in the order they are served."""
    chunks: list[tuple[Sequence, int]]
    """The others, and how many tokens of each."""

    def __bool__(self) -> bool:
        return len(self.decodes) > 0 or len(self.chunks) > 0


@dataclass(frozen=True, slots=True)
class Entry:
    """A sequence's part in a step that has been submitted."""

    sequence: Sequence
    length: int
    draws: bool


@dataclass(frozen=True, slots=True)
class Flight:
    """Who is in a step that has been submitted, in the order of its plan."""

    cohort: Cohort | None
    """Those that are told in columns; a token and a draw each."""
    entries: tuple[Entry, ...]
    over: tuple[int, ...] = ()
    """Places in the cohort of those that had finished when the step came back."""

    @property
    def sequences(self) -> list[Sequence]:
        """All of them."""
        return [*self._told_in_columns, *(entry.sequence for entry in self.entries)]

    @property
    def drawing(self) -> list[Sequence]:
        """Those that draw a token."""
        return [*self._told_in_columns, *(e.sequence for e in self.entries if e.draws)]

    def take(
        self, token_ids: tuple[int, ...]
    ) -> tuple[tuple[StepTokens, ...], Iterable[tuple[Sequence, int]]]:
        """Takes in what was drawn, of those that go on as before.

        Args:
            token_ids: By who draws.

        Returns:
            What was taken in; and the others with what they drew, for which more is to be done.
        """
        size = len(self._told_in_columns)
        if self.cohort is None:
            return (), zip(self.drawing, token_ids, strict=True)
        told, apart = self.cohort.take(token_ids[:size], self.over)
        others = (entry.sequence for entry in self.entries if entry.draws)
        return (told,), [*apart, *zip(others, token_ids[size:], strict=True)]

    @property
    def _told_in_columns(self) -> list[Sequence]:
        return self.cohort.sequences if self.cohort is not None else []


def plan_step(
    step: int, chosen: Chosen, receiver: EmbeddingReceiver, seats: Seats, *, most_rows: int
) -> tuple[StepPlan, Flight]:
    """The plan, and who is in it; sequences count as in flight from here on.

    Args:
        step: Its number.
        chosen: Whom to plan for.
        receiver: Where rows of media lie.
        seats: Who sits where.
        most_rows: Decoding sequences of a step that may be told in columns.
    """
    at, counts = chosen.decodes, seats.counts
    fits = counts.pages[at] <= counts.told[at] + 1  # there is room for one new page of each
    if np.count_nonzero(fits) > most_rows:
        fits[:] = False
    others = [(sequence, 1) for sequence in seats.holders(at[~fits])] + chosen.chunks
    others.sort(key=lambda pair: pair[1] > 1)  # stable: single tokens first
    planned = tuple(_planned(sequence, length, receiver) for sequence, length in others)
    # Nobody is in flight before what can raise has been done: else it would be for ever.
    cohort = seats.cohort(at[fits]) if fits.any() else None
    rows = cohort.begin() if cohort else None
    entries = []
    for (sequence, length), part in zip(others, planned, strict=True):
        draws = part.draw is not None
        sequence.begin(length, draws)
        entries.append(Entry(sequence, length, draws))
    return StepPlan(step, planned, rows), Flight(cohort, tuple(entries))


def _planned(sequence: Sequence, length: int, receiver: EmbeddingReceiver) -> PlannedSequence:
    begin, end = sequence.num_scheduled, sequence.num_scheduled + length
    request = sequence.request
    first_new = sequence.num_told
    assert sequence.seat is not None, "not in the batch"
    return PlannedSequence(
        request_id=request.request_id,
        choice=sequence.choice,
        seat=sequence.seat,
        token_ids=sequence.tokens(begin, end),
        start=begin,
        position=request.position(begin),
        block_table=sequence.tell(),
        first_block=first_new,
        grid_positions=request.grid_positions(begin, end),
        embeds=embed_spans(sequence, length, receiver),
        draw=sequence.draw() if length == sequence.num_left else None,
    )
