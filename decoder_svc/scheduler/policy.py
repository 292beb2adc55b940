"""Who goes first and who gives way: by `serving_order`, priority and arrival together."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

import numpy as np

from decoder_svc.engine.counts import Ints
from decoder_svc.engine.request import Sequence


class Queue:
    """Sequences in the order they are served. The first is never preempted for a later one."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []
        self._seats: Ints | None = None
        self._tokens: list[int] = []
        self.num_tokens = 0
        """That all of them had when they came."""

    @property
    def seats(self) -> Ints:
        """[S]: of everybody, in order; they all have one."""
        if self._seats is None:
            self._seats = np.array([s.seat for s in self._items], dtype=np.int64)
        return self._seats

    def until(self, last: Sequence) -> int:
        """How many are not behind this one, itself included."""
        return bisect_right(self._items, last.order, key=_order)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._items))

    def __contains__(self, sequence: Sequence) -> bool:
        at = bisect_left(self._items, sequence.order, key=_order)
        return at < len(self._items) and self._items[at] is sequence

    def add(self, sequence: Sequence) -> None:
        """Puts it where it belongs; one that was preempted comes back before later arrivals."""
        at = bisect_left(self._items, sequence.order, key=_order)
        self._items.insert(at, sequence)
        self._tokens.insert(at, sequence.num_tokens)
        self.num_tokens += self._tokens[at]
        self._seats = None

    def remove(self, sequence: Sequence) -> None:
        """Takes it out."""
        at = bisect_left(self._items, sequence.order, key=_order)
        assert self._items[at] is sequence, "not in this queue"
        del self._items[at]
        self.num_tokens -= self._tokens.pop(at)
        self._seats = None

    @property
    def first(self) -> Sequence | None:
        """Next to be served."""
        return self._items[0] if self._items else None

    def victim(self, than: Sequence, *, step: int) -> Sequence | None:
        """The last sequence behind `than` that holds pages and is neither in flight nor of `step`,
        the one that is being put together; if any."""
        for candidate in reversed(self._items):
            if candidate.order <= than.order:
                return None
            if candidate.blocks and not candidate.in_flight and candidate.last_step < step:
                return candidate
        return None


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order
