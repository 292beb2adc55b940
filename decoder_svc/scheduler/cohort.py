"""Sequences that decode together: each computes its last token and draws the next, all at once.

What is done for each of them in every step is done in arrays, or in loops without a branch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import compress

import numpy as np

from decoder_svc.engine.counts import Counts, Ints
from decoder_svc.engine.messages import NO_PAGE, PENDING, DecodeRows, StepTokens
from decoder_svc.engine.request import Sequence
from decoder_svc.sampling.params import Draw


class Roster:
    """Who sits where, in columns.

    Args:
        size: Seats.
    """

    def __init__(self, size: int) -> None:
        self.counts = Counts(size)
        self.sequences = np.full(size, None, dtype=object)
        self.request_ids = np.full(size, None, dtype=object)
        self.params = np.full(size, None, dtype=object)
        self.appends = np.full(size, None, dtype=object)
        """Add a token to an output."""
        self.stop_ids: Counter[int] = Counter()
        """That end one of them or another."""

    def enter(self, seat: int, sequence: Sequence) -> None:
        """Somebody sits down."""
        sequence.sit(seat, self.counts)
        self.sequences[seat] = sequence
        self.request_ids[seat] = sequence.request.request_id
        self.params[seat] = sequence.request.sampling
        self.appends[seat] = sequence.output.append
        self.stop_ids.update(sequence.request.sampling.stop_token_ids)

    def leave(self, seat: int) -> None:
        """And leaves."""
        for token_id in self.sequences[seat].request.sampling.stop_token_ids:
            self.stop_ids[token_id] -= 1
            if not self.stop_ids[token_id]:
                del self.stop_ids[token_id]
        self.sequences[seat].leave()
        for column in (self.sequences, self.request_ids, self.params, self.appends):
            column[seat] = None


class Cohort:
    """The same sequences step by step, as long as nobody comes or goes.

    Args:
        at: [S], their seats.
        roster: Who sits there.
    """

    def __init__(self, at: Ints, roster: Roster) -> None:
        self.at = at
        self.sequences: list[Sequence] = roster.sequences[at].tolist()
        self._roster = roster
        self._counts = roster.counts
        self._request_ids = tuple(roster.request_ids[at].tolist())
        self._choices = tuple(roster.counts.choice[at].tolist())
        self._appends = roster.appends[at].tolist()
        self._is_plain = bool(roster.counts.is_plain[at].all())

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
        draws = () if self._is_plain else self._draws()
        counts.told[at] = pages
        counts.begin(at)
        return DecodeRows(numbers.tobytes(), draws)

    def _draws(self) -> tuple[Draw, ...]:
        counts, at = self._counts, self.at
        if counts.needs_host[at].any():
            return tuple([s.draw() for s in self.sequences])
        positions = counts.tokens[at] + counts.drawing[at] - counts.prompt[at]
        params = self._roster.params[at].tolist()
        return tuple(map(Draw, params, self._choices, positions.tolist()))

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
        apart = (tokens + 1 >= counts.most[at]) | (counts.is_heard[at] == 0)
        apart[list(over)] = True
        stop_ids = self._roster.stop_ids
        if not stop_ids.keys().isdisjoint(token_ids):
            apart |= [token_id in stop_ids for token_id in token_ids]
        positions = tuple((tokens - counts.prompt[at]).tolist())
        columns = (self._request_ids, self._choices, positions, token_ids)
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
