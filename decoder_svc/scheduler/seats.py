"""Numbers for sequences in the batch: ranks keep what they know of each under its number."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from decoder_svc.engine.request import Sequence


class Seats:
    """Hands out the lowest free number, so that the numbers in use lie close together.

    Args:
        count: Sequences in the batch at once.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count))
        heapify(self._free)

    @property
    def num_free(self) -> int:
        """Sequences that can still come in."""
        return len(self._free)

    def take(self, sequence: Sequence) -> None:
        """Gives the sequence a seat; the caller has seen that one is free."""
        assert sequence.seat is None, "seated already"
        sequence.seat = heappop(self._free)

    def free(self, sequence: Sequence) -> None:
        """Takes the sequence's seat back, if it has one."""
        if sequence.seat is not None:
            heappush(self._free, sequence.seat)
            sequence.seat = None

    def check(self, holders: list[Sequence]) -> None:
        """Raises AssertionError unless just these hold seats, each its own."""
        held = sorted(-1 if s.seat is None else s.seat for s in holders)
        assert sorted([*held, *self._free]) == list(range(self._count)), "seats leaked or shared"
