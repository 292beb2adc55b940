"""Who goes first and who gives way: by `serving_order`, priority and arrival together."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from decoder_svc.engine.request import Sequence


class Queue:
    """Sequences in the order they are served. The first is never preempted for a later one."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._items))

    def __contains__(self, sequence: Sequence) -> bool:
        at = bisect_left(self._items, sequence.order, key=_order)
        return at < len(self._items) and self._items[at] is sequence

    def add(self, sequence: Sequence) -> None:
        """Puts it where it belongs; one that was preempted comes back before later arrivals."""
        self._items.insert(bisect_left(self._items, sequence.order, key=_order), sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes it out."""
        at = bisect_left(self._items, sequence.order, key=_order)
        assert self._items[at] is sequence, "not in this queue"
        del self._items[at]

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
