"""Who gets pages next: the rule that keeps the oldest request moving."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from chiasm.plan import Span
from decoder_svc.embeddings.events import Demand
from decoder_svc.embeddings.fetch import Fetch, ItemState, PartState
from decoder_svc.embeddings.pages import PagePool
from decoder_svc.embeddings.rows import ItemRows, Slot

Key = tuple[bytes, int]
"""A fetch and a segment of it."""


@dataclass(frozen=True, slots=True)
class _Want:
    """A demand, looked up: the rows wanted of one item, and the item's state."""

    request_id: str
    wanted: Span
    rows: ItemRows
    parts: Iterable[PartState]  # by row


@dataclass(slots=True)
class _Round:
    head: str | None
    frontier: bool = True  # every row of the head so far has landed, is on its way or granted now
    batches: dict[Key, list[Slot]] = field(default_factory=dict)


class GrantPlanner:
    """Takes pages for rows that are ready.

    Anyone may take a page while more than `reserve` are free. The last ones go only to the head
    (the oldest request that waits for rows), and only for its next rows: those with no gap before.
    What the reserve holds is therefore consumed before anything else of the head is needed, and a
    reserve page never waits for a row that comes later.

    Rows that are not ready, of segments that an encoder has announced, get pages only while more
    than half of all are free, never of the reserve: ready rows always find the other half.

    Args:
        pool: The slab's pages.
        reserve: Pages kept for the head.
        page_rows: Rows of one page.
    """

    def __init__(self, pool: PagePool, *, reserve: int, page_rows: int) -> None:
        self._pool = pool
        self._reserve = reserve
        self._page_rows = page_rows

    def grants(
        self, demands: Iterable[Demand], requests: Mapping[str, Mapping[int, ItemState]]
    ) -> Iterator[tuple[Key, list[Slot]]]:
        """Slots by fetch and segment, in the order in which they are to be granted.

        A second call with nothing changed between has nothing to add.
        """
        wants = [
            _Want(d.request_id, d.rows, item.rows, item.parts.values())
            for d in demands
            if (item := requests.get(d.request_id, {}).get(d.item)) is not None
        ]
        unread = (w.request_id for w in wants if _waits_for_rows(requests[w.request_id]))
        yield from self._plan(wants, head=next(unread, None)).items()
        yield from self._plan_ahead(wants).items()

    def _plan(self, wants: Iterable[_Want], *, head: str | None) -> dict[Key, list[Slot]]:
        turn = _Round(head)
        for want in wants:
            for gap in want.rows.missing(want.wanted):
                for fetch, segment, rows in self._page_pieces(want.parts, gap):
                    if fetch is None:
                        turn.frontier = turn.frontier and want.request_id != head
                    elif self._may_take(want.request_id, turn):
                        slot = self._take(want.rows, rows)
                        turn.batches.setdefault((fetch.fetch_id, segment), []).append(slot)
                    else:
                        return turn.batches  # whoever comes later may not either
        return turn.batches

    def _plan_ahead(self, wants: Iterable[_Want]) -> dict[Key, list[Slot]]:
        """For announced rows, after those that are ready."""
        batches: dict[Key, list[Slot]] = {}
        for want in wants:
            for gap in want.rows.missing(want.wanted):
                for fetch, segment, rows in self._announced_pieces(want.parts, gap):
                    if not self._has_plenty():
                        return batches
                    batches.setdefault((fetch.fetch_id, segment), []).append(
                        self._take(want.rows, rows)
                    )
        return batches

    def _has_plenty(self) -> bool:
        return self._pool.num_free > max(self._reserve, self._pool.num_pages // 2)

    def _may_take(self, request_id: str, turn: _Round) -> bool:
        entitled = request_id == turn.head and turn.frontier
        return self._pool.num_free > (0 if entitled else self._reserve)

    def _take(self, item: ItemRows, rows: Span) -> Slot:
        page = self._pool.take()
        slot = Slot(rows, page, page * self._page_rows)
        item.add(slot)
        return slot

    def _page_pieces(
        self, parts: Iterable[PartState], gap: Span
    ) -> Iterator[tuple[Fetch | None, int, Span]]:
        """Cuts missing rows by part, segment and page; None for rows that are not ready."""
        for part in parts:
            span = part.rows.intersect(gap)
            fetch = part.winner
            if not len(span):
                continue
            if fetch is None:
                yield None, 0, span
                continue
            for segment, rows in fetch.cover(span):
                if segment is None:
                    yield None, 0, rows
                    continue
                for piece in self._pages(rows):
                    yield fetch, segment, piece

    def _announced_pieces(
        self, parts: Iterable[PartState], gap: Span
    ) -> Iterator[tuple[Fetch, int, Span]]:
        for part in parts:
            fetch = part.promising
            if fetch is None:
                continue
            for segment, announced in fetch.announced.items():
                rows = announced.intersect(gap)
                if len(rows) and segment not in fetch.segments:
                    for piece in self._pages(rows):
                        yield fetch, segment, piece

    def _pages(self, rows: Span) -> Iterator[Span]:
        for begin in range(rows.begin, rows.end, self._page_rows):
            yield Span(begin, min(begin + self._page_rows, rows.end))


def _waits_for_rows(items: Mapping[int, ItemState]) -> bool:
    return not all(item.rows.complete for item in items.values())
