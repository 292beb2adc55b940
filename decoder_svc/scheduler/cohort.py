"""Sequences that decode together: each computes its last token and draws the next, all at once.

What is done for each of them in every step is done in arrays, or in loops without a branch.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress

import numpy as np

from decoder_svc.engine.counts import Counts, Ints
from decoder_svc.engine.messages import NO_PAGE, PENDING, DecodeRows, StepTokens
from decoder_svc.engine.request import Sequence


class Cohort:
    """The same sequences step by step, as long as nobody comes or goes.

    Args:
        at: [S], their seats.
        sequences: Who sits there.
        counts: Of the batch.
    """

    def __init__(self, at: Ints, sequences: list[Sequence], counts: Counts) -> None:
        self.at = at
        self.sequences = sequences
        self._counts = counts
        self.request_ids = tuple([s.request.request_id for s in sequences])
        self._choices = tuple([s.choice for s in sequences])
        self._appends = [s.output.append for s in sequences]
        self._stop_ids = frozenset().union(*{s.request.sampling.stop_token_ids for s in sequences})
        self._is_plain = all(s.request.is_plain for s in sequences)
        self._unheard = list(range(len(sequences)))
        """Who may not have drawn its first token yet."""

    def begin(self) -> DecodeRows:
        """They are part of a step. Returns what ranks are told."""
        counts, at = self._counts, self.at
        scheduled, told, pages = counts.scheduled[at], counts.told[at], counts.pages[at]
        numbers = np.empty((6, len(at)), dtype=np.int32)
        numbers[0] = PENDING
        known = (counts.drawing[at] == 0).nonzero()[0]
        if len(known):
            numbers[0, known] = [self.sequences[index].output[-1] for index in known.tolist()]
        numbers[1] = at
        numbers[2] = scheduled
        numbers[3] = scheduled + counts.delta[at]
        is_new = pages > told
        numbers[4] = np.where(is_new, told, NO_PAGE)
        numbers[5] = np.where(is_new, counts.newest_page[at], 0)
        draws = () if self._is_plain else tuple([s.draw() for s in self.sequences])
        counts.told[at] = pages
        counts.begin(at)
        return DecodeRows(numbers.tobytes(), draws)

    def end(self, *, counts: bool) -> list[int]:
        """The step is over; with `counts` it computed what it should.

        Returns:
            The places of those of whom no more is wanted.
        """
        self._counts.end(self.at, counts=counts)
        found: list[int] = self._counts.is_over[self.at].nonzero()[0].tolist()
        return found

    def take(
        self, token_ids: tuple[int, ...], over: Iterable[int]
    ) -> tuple[StepTokens, Iterable[tuple[Sequence, int]]]:
        """Takes in what was drawn, of those that go on as before.

        Args:
            token_ids: [S].
            over: The places of those that are not to go on; others may have their seats by now.

        Returns:
            What was taken in; and the others with what they drew, for which more is to be done.
        """
        counts, at = self._counts, self.at
        tokens = counts.tokens[at]
        apart = tokens + 1 >= counts.most[at]
        apart[list(over)] = True
        if self._unheard:
            sequences = self.sequences
            self._unheard = [
                i for i in self._unheard if sequences[i].request.clock.first_token is None
            ]
            apart[self._unheard] = True
        if not self._stop_ids.isdisjoint(token_ids):
            apart |= [token_id in self._stop_ids for token_id in token_ids]
        positions = tuple((tokens - counts.prompt[at]).tolist())
        columns = (self.request_ids, self._choices, positions, token_ids)
        if not apart.any():
            counts.tokens[at] = tokens + 1
            for append, token_id in zip(self._appends, token_ids, strict=True):
                append(token_id)
            return StepTokens(*columns), ()
        stays = ~apart
        kept = stays.tolist()
        counts.tokens[at[stays]] += 1
        told = StepTokens(*(tuple(compress(column, kept)) for column in columns))
        for append, token_id in zip(compress(self._appends, kept), told.token_ids, strict=True):
            append(token_id)
        left = apart.tolist()
        others = zip(compress(self.sequences, left), compress(token_ids, left), strict=True)
        return told, list(others)
