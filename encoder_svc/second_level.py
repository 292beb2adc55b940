"""Finished rows that the store has no room for any more: kept in slower memory, oldest out first.

Policy alone; a `Keeper` moves the bytes. What is wanted again comes back to the first level:
whoever sends rows finds all of them in one kind of memory.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from encoder_svc.messages import RowBuffer

if TYPE_CHECKING:
    from encoder_svc.store import Entry


class Keeper(Protocol):
    """Moves rows between the levels. Neither call waits for a forward."""

    def spill(self, buffer: RowBuffer) -> RowBuffer | None:
        """The same rows in slower memory; None when it has no place for them."""
        ...

    def restore(self, buffer: RowBuffer) -> RowBuffer:
        """The same rows back where finished rows lie."""
        ...


class SecondLevel:
    """Entries without interest, moved out of the store's budget into one of their own.

    Args:
        budget: Bytes of rows.
        keeper: Moves them; needed where there is a budget.
    """

    def __init__(self, budget: int = 0, keeper: Keeper | None = None) -> None:
        assert keeper is not None or not budget
        self._budget = budget
        self._keeper = keeper
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        self.used_bytes = 0

    def put(self, entry: Entry) -> list[Entry]:
        """Takes an entry in. Returns those that are lost to make room, or the entry itself."""
        if entry.nbytes > self._budget:
            return [entry]
        assert self._keeper is not None
        lost = []
        while self.used_bytes + entry.nbytes > self._budget:
            lost.append(self._entries.popitem(last=False)[1])
            self.used_bytes -= lost[-1].nbytes
        moved = []
        for segment in entry.segments:
            buffer = self._keeper.spill(segment.buffer)
            if buffer is None:
                return [*lost, entry]
            moved.append(replace(segment, buffer=buffer))
        entry.segments[:] = moved
        self.put_back(entry)
        return lost

    def put_back(self, entry: Entry) -> None:
        """Takes in what `take_out` gave out, or what has just moved."""
        entry.spilled = True
        self._entries[entry.key] = entry
        self.used_bytes += entry.nbytes

    def take_out(self, entry: Entry) -> None:
        """Its bytes are no longer counted here; its rows have not moved yet."""
        del self._entries[entry.key]
        self.used_bytes -= entry.nbytes

    def restore(self, entry: Entry) -> None:
        """Moves the rows of an entry that was taken out."""
        assert self._keeper is not None and entry.key not in self._entries
        entry.segments[:] = [
            replace(segment, buffer=self._keeper.restore(segment.buffer))
            for segment in entry.segments
        ]
        entry.spilled = False

    def check(self) -> None:
        """Raises AssertionError when bytes do not add up."""
        assert self.used_bytes == sum(e.nbytes for e in self._entries.values()) <= self._budget
        assert all(entry.spilled and not entry.interest for entry in self._entries.values())
