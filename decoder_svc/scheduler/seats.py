"""Numbers for sequences in the batch: ranks keep what they know of each under its number."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np

from decoder_svc.engine.counts import Ints
from decoder_svc.engine.request import Sequence
from decoder_svc.scheduler.cohort import Cohort, Roster
from decoder_svc.scheduler.policy import Queue

_MOST_COHORTS = 8  # several stages have several; what is cheap to make again is not kept for long


class Seats:
    """Hands out the lowest free number, so that the numbers in use lie close together.

    Args:
        count: Sequences in the batch at once.
    """

    def __init__(self, count: int) -> None:
        self._roster = Roster(count)
        self.counts = self._roster.counts
        """Of whoever has a seat."""
        self._count = count
        self._free = list(range(count))
        heapify(self._free)
        self._cohorts: dict[bytes, Cohort] = {}

    @property
    def num_free(self) -> int:
        """Sequences that can still come in."""
        return len(self._free)

    def num_left(self, running: Queue) -> int:
        """The same, less those for parked siblings of whoever is in the batch."""
        parents = [s.request for s in self.parents(running)]
        return self.num_free - sum({id(r): r.num_parked for r in parents}.values())

    def parents(self, running: Queue) -> list[Sequence]:
        """Those in the batch that have siblings."""
        at = running.seats
        return self.holders(at[self.counts.has_siblings[at] != 0])

    def holders(self, at: Ints) -> list[Sequence]:
        """Who has these seats, in this order; all of them are taken."""
        found: list[Sequence] = self._roster.sequences[at].tolist()
        return found

    def cohort(self, at: Ints) -> Cohort:
        """Who has these seats, to decode together; the same as before if they are."""
        key = at.tobytes()
        if key not in self._cohorts:
            if len(self._cohorts) == _MOST_COHORTS:
                self._cohorts.clear()
            self._cohorts[key] = Cohort(at, self._roster)
        return self._cohorts[key]

    def take(self, sequence: Sequence) -> None:
        """Gives the sequence a seat; the caller has seen that one is free."""
        assert sequence.seat is None, "seated already"
        seat = heappop(self._free)
        self._roster.enter(seat, sequence)
        self._cohorts.clear()

    def free(self, sequence: Sequence) -> None:
        """Takes the sequence's seat back, if it has one."""
        if sequence.seat is not None:
            heappush(self._free, sequence.seat)
            self._roster.leave(sequence.seat)
            self._cohorts.clear()

    def check(self, holders: list[Sequence]) -> None:
        """Raises AssertionError unless just these hold seats, each its own."""
        held = sorted(-1 if s.seat is None else s.seat for s in holders)
        assert sorted([*held, *self._free]) == list(range(self._count)), "seats leaked or shared"
        for sequence in holders:
            assert sequence.seat is not None and self.holders(np.array([sequence.seat])) == [
                sequence
            ]
            sequence.check()
