"""Which rows of one item are where: consumed, landed in the slab, on their way, or missing.

      0 ......... consumed ......................... num_rows
      | gone      | landed | on its way |  missing  |

Owns no pages; a `Slot` names the page its rows lie in.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from chiasm.plan import Span
from chiasm.transport.base import Destination
from decoder_svc.embeddings.events import SlabRun


@dataclass(slots=True, eq=False)
class Slot:
    """Rows of an item in one page of the slab, from the page's first row on."""

    rows: Span
    page: int
    first_slab_row: int
    landed: bool = False

    def land(self, first_row_of_bank: int) -> None:
        """Its rows are there; banks of the slab follow one another."""
        self.first_slab_row += first_row_of_bank
        self.landed = True

    def bank(self, bank_rows: int) -> int:
        """The bank it has landed in."""
        return self.first_slab_row // bank_rows


def destinations_of(slots: Sequence[Slot], row_bytes: int) -> tuple[Destination, ...]:
    """Where the rows of a grant go; slots that are neighbours in item and slab are one place."""
    places: list[Destination] = []
    for slot in slots:
        address, length = slot.first_slab_row * row_bytes, len(slot.rows) * row_bytes
        if places:
            last = places[-1]
            if (last.rows.end, last.address + last.length) == (slot.rows.begin, address):
                rows = Span(last.rows.begin, slot.rows.end)
                places[-1] = Destination(rows, last.address, last.length + length)
                continue
        places.append(Destination(slot.rows, address, length))
    return tuple(places)


class ItemRows:
    """The rows of one item.

    Args:
        num_rows: Rows of the item.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.consumed = 0
        self._slots: list[Slot] = []  # by first row; they never overlap

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Every slot, by first row."""
        return tuple(self._slots)

    @property
    def complete(self) -> bool:
        """Whether every row is consumed or landed."""
        return self.landed_until(self.consumed) == self.num_rows

    def add(self, slot: Slot) -> None:
        """Takes in a slot whose rows are on their way."""
        at = bisect_left(self._slots, slot.rows.begin, key=_begin)
        assert at == 0 or self._slots[at - 1].rows.end <= slot.rows.begin, "slots overlap"
        assert at == len(self._slots) or slot.rows.end <= self._slots[at].rows.begin, (
            "slots overlap"
        )
        self._slots.insert(at, slot)

    def remove(self, slot: Slot) -> None:
        """Forgets a slot: its rows are missing again, unless consumed."""
        self._slots.remove(slot)

    def consume(self, until: int) -> list[Slot]:
        """Moves the consumed edge up; returns the landed slots that are needed no more."""
        self.consumed = max(self.consumed, until)
        done = [s for s in self._slots if s.landed and s.rows.end <= self.consumed]
        for slot in done:
            self._slots.remove(slot)
        return done

    def landed_until(self, begin: int) -> int:
        """The largest e such that rows [begin, e) are all landed; `begin` when row begin is not."""
        edge = begin
        for slot in self._from(begin):
            if not slot.landed or slot.rows.begin > edge:
                break
            edge = slot.rows.end
        return edge

    def missing(self, span: Span) -> list[Span]:
        """The runs of `span` that are neither consumed, landed nor on their way, in order."""
        edge = max(span.begin, self.consumed)
        end = min(span.end, self.num_rows)
        gaps = []
        for slot in self._from(edge):
            if slot.rows.begin >= end:
                break
            if slot.rows.begin > edge:
                gaps.append(Span(edge, slot.rows.begin))
            edge = slot.rows.end
        if edge < end:
            gaps.append(Span(edge, end))
        return gaps

    def has_all(self, span: Span) -> bool:
        """Whether every row of `span` is consumed or landed."""
        begin = max(span.begin, self.consumed)
        return begin >= span.end or self.landed_until(begin) >= span.end

    def locate(self, span: Span) -> tuple[SlabRun, ...]:
        """Where landed rows lie, in order; neighbours in the slab are one run."""
        runs: list[SlabRun] = []
        edge = span.begin
        for slot in self._from(span.begin):
            if edge >= span.end:
                break
            assert slot.landed and slot.rows.begin <= edge, f"rows from {edge} have not landed"
            end = min(slot.rows.end, span.end)
            first = slot.first_slab_row + edge - slot.rows.begin
            if runs and runs[-1].first_slab_row + runs[-1].num_rows == first:
                runs[-1] = SlabRun(runs[-1].first_slab_row, runs[-1].num_rows + end - edge)
            else:
                runs.append(SlabRun(first, end - edge))
            edge = end
        assert edge >= span.end, f"rows from {edge} have not landed"
        return tuple(runs)

    def _from(self, row: int) -> Iterator[Slot]:
        at = bisect_right(self._slots, row, key=_begin)
        if at and self._slots[at - 1].rows.end > row:
            at -= 1
        return iter(self._slots[at:])


def _begin(slot: Slot) -> int:
    return slot.rows.begin
