"""The decoder's half of the transfer contract: which rows to ask from whom, into which pages.

A pure state machine: events and calls in, commands and notices out; no clock, no sockets.
Two rules carry it. A page is reused only after the fetch it was granted to has landed in it or can
write no more. Pages are granted for rows that are ready, in admission order, and the last `reserve`
pages only for the next rows of the oldest request: so the oldest always moves. While there is
plenty, rows that an encoder has announced get theirs before they are ready.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence

from chiasm.plan import Cause, Promise, Source, Span
from chiasm.rows import RowFormat
from chiasm.transport.base import HOST_BANK
from decoder_svc.embeddings.events import (
    Accepted,
    Broken,
    Cancel,
    Demand,
    Failed,
    Fence,
    Fenced,
    FetchCommand,
    FetchEvent,
    Grant,
    ItemLanded,
    Landed,
    Notice,
    Open,
    PartLost,
    Quiesced,
    Ready,
    SlabRun,
)
from decoder_svc.embeddings.fetch import Counters, Fetch, FetchState, ItemState, PartState
from decoder_svc.embeddings.granting import GrantPlanner
from decoder_svc.embeddings.pages import PagePool, PageState
from decoder_svc.embeddings.rows import ItemRows, Slot, destinations_of


class EmbeddingReceiver:
    """Fetches the rows of requests' media into pages. Owned by the engine's thread.

    Args:
        pages: Pages of the slab.
        page_rows: Rows of one page.
        row_bytes: Bytes of one row.
        reserve_rows: Rows the oldest request can always have pages for; half the slab at most.
        grant_pages: Most pages of one grant: rows are usable grant by grant.
        row_format: When given, every Ready must be of exactly this format.
        new_id: Makes fetch ids, never one twice.
    """

    def __init__(
        self,
        *,
        pages: int,
        page_rows: int,
        row_bytes: int,
        reserve_rows: int = 4096,
        grant_pages: int = 16,
        row_format: RowFormat | None = None,
        new_id: Callable[[], bytes] = lambda: secrets.token_bytes(16),
    ) -> None:
        self.counters = Counters()
        self.revision = 1  # goes up with all that may let a row be granted, or used
        self._granted: tuple[int, Sequence[Demand]] = (-1, ())
        self._pool = PagePool(pages)
        self._row_bytes = row_bytes
        self._bank_rows = pages * page_rows
        self._grant_pages = grant_pages
        reserve = max(1, min(-(-reserve_rows // page_rows), pages // 2))
        self._planner = GrantPlanner(self._pool, reserve=reserve, page_rows=page_rows)
        self._format = row_format
        self._new_id = new_id
        self._requests: dict[str, dict[int, ItemState]] = {}
        self._fetches: dict[bytes, Fetch] = {}  # until nothing of them can be written any more
        self._commands: list[FetchCommand] = []
        self._notices: list[Notice] = []

    # What the engine asks for.

    def add(self, request_id: str, promises: Sequence[Promise]) -> None:
        """Opens a fetch for every part of every promise."""
        assert request_id not in self._requests, f"{request_id} was added twice"
        items = self._requests[request_id] = {}
        for promise in promises:
            parts = {p.part: PartState(p.part, p.rows, p.attempt) for p in promise.parts}
            item = ItemState(promise.plan.digest, ItemRows(promise.plan.num_rows), parts)
            items[promise.item] = item
            for part in promise.parts:
                self._open(request_id, promise.item, parts[part.part], part.source, part.attempt)

    def redirect(self, request_id: str, item: int, part: int, attempt: int, source: Source) -> bool:
        """Replaces every source of a part. Rows that landed stay; False for a stale attempt."""
        state = self._part(request_id, item, part)
        if state is None or self._is_stale(attempt, state.attempt):
            self.counters.stale_attempts += 1
            return False
        state.attempt = attempt
        for fetch in tuple(state.candidates):
            self._end(fetch)
        if not self._requests[request_id][item].rows.has_all(state.rows):
            self._open(request_id, item, state, source, attempt)
        return True

    def add_source(
        self, request_id: str, item: int, part: int, attempt: int, source: Source
    ) -> bool:
        """Adds a hedge: the source Ready first serves the part. False for a stale attempt."""
        state = self._part(request_id, item, part)
        if state is None or self._is_stale(attempt, max(state.attempt - 1, state.lost_attempt)):
            self.counters.stale_attempts += 1
            return False
        state.attempt = attempt
        complete = self._requests[request_id][item].rows.has_all(state.rows)
        if state.winner is None and not complete:
            self._open(request_id, item, state, source, attempt)
        return True

    def grant(self, demands: Sequence[Demand]) -> None:
        """Grants pages for demanded rows that are ready, or announced, as far as pages allow.

        Demands come in admission order, each request's in prompt order, and name all in the batch
        who wait for rows: with an empty span who wants none yet, to keep its place and its right to
        the reserve. Rows already granted or landed cost nothing; unknown requests are skipped.
        """
        if self._granted == (self.revision, demands):
            return  # nothing has moved since
        self._granted = (self.revision, demands)
        for (fetch_id, segment), slots in self._planner.grants(demands, self._requests):
            self._emit_grants(fetch_id, segment, slots)

    def landed_until(self, request_id: str, item: int, begin: int) -> int:
        """The largest e such that rows [begin, e) are all landed."""
        return self._requests[request_id][item].rows.landed_until(begin)

    def locate(self, request_id: str, item: int, rows: Span) -> tuple[SlabRun, ...]:
        """Where landed rows lie in the slab, in order."""
        return self._requests[request_id][item].rows.locate(rows)

    def consume(self, request_id: str, item: int, until: int) -> None:
        """Rows below `until` are not needed any more: they are in the KV cache."""
        self.revision += 1
        state = self._requests[request_id][item]
        for slot in state.rows.consume(until):
            self._pool.free(slot.page)
        self._settle(request_id, item)

    def preempt(self, request_id: str, items_needed: Mapping[int, int]) -> None:
        """The request starts over: rows from the given one on are needed again, per item.

        Every item named gives its pages back: preempting is a way out of a full slab. Parts of
        which rows were there, or on their way, are reported PREEMPTED; other fetches go on.
        """
        self.revision += 1
        for index, first in items_needed.items():
            rows = self._requests[request_id][index].rows
            used = Span(first, max(first, rows.consumed))
            rows.consumed = min(rows.consumed, first)
            self._recall(request_id, index, rows.slots, used)

    def lose_bank(self, bank: int) -> None:
        """That memory is gone, with the rows that have landed in it; others are kept."""
        self.revision += 1
        for fetch in self._fetches.values():
            fetch.num_grants_lost = fetch.num_grants
        for request_id, items in self._requests.items():
            for index, item in items.items():
                slots = item.rows.slots
                gone = [s for s in slots if s.landed and s.bank(self._bank_rows) == bank]
                self._recall(request_id, index, gone, Span(0, 0))

    def release(self, request_id: str) -> None:
        """The request is over: fetches are cancelled, pages come free as their writers stop."""
        self.revision += 1
        for item in self._requests.get(request_id, {}).values():
            for part in item.parts.values():
                for fetch in tuple(part.candidates):
                    self._end(fetch)
            for slot in item.rows.slots:
                self._pool.free(slot.page)
        self._requests.pop(request_id, None)

    # What the fetcher reports.

    def on_event(self, event: FetchEvent) -> None:
        """Takes in one event. Nothing a peer says raises: the worst is a lost part."""
        self.revision += 1
        fetch = self._fetches.get(event.fetch_id)
        if fetch is None:
            self.counters.stale_events += 1
            return
        match event:
            case Accepted():
                fetch.announce(event.segments)
            case Ready():
                self._on_ready(fetch, event)
            case Landed():
                self._on_landed(fetch, event)
            case Failed(_, cause, message):
                self._lose(fetch, cause, message)
            case Quiesced() | Fenced():
                self._lose(fetch, Cause.LOST, "the encoder ended the fetch early", cancel=False)
                self._forget(fetch)
            case Broken():
                self._on_broken(fetch)

    def take_commands(self) -> list[FetchCommand]:
        """Commands since the last call, in order."""
        commands, self._commands = self._commands, []
        return commands

    def take_notices(self) -> list[Notice]:
        """Notices since the last call, in order."""
        notices, self._notices = self._notices, []
        return notices

    @property
    def num_free_pages(self) -> int:
        """Pages that can be granted now."""
        return self._pool.num_free

    def check(self) -> None:
        """Raises AssertionError when a page has no owner, two owners, or the wrong state."""
        self._pool.check()
        owners: dict[int, PageState] = {}
        for fetch in self._fetches.values():
            broken = fetch.state is FetchState.BROKEN
            for slot in fetch.slots:
                assert slot.page not in owners, f"page {slot.page} has two owners"
                owners[slot.page] = PageState.QUARANTINED if broken else PageState.WRITING
        for items in self._requests.values():
            for item in items.values():
                for slot in item.rows.slots:
                    if slot.landed:
                        assert slot.page not in owners, f"page {slot.page} has two owners"
                        owners[slot.page] = PageState.LANDED
                    else:
                        assert owners[slot.page] is PageState.WRITING, "a grant is not pinned"
                for part in item.parts.values():
                    assert all(f.live and f.fetch_id in self._fetches for f in part.candidates)
        for page in range(self._pool.num_pages):
            assert self._pool.state(page) is owners.get(page, PageState.FREE), f"page {page} leaked"
        revision, demands = self._granted
        missed = revision == self.revision and list(self._planner.grants(demands, self._requests))
        assert not missed, "what was granted could have been more"

    # How it is done.

    def _part(self, request_id: str, item: int, part: int) -> PartState | None:
        state = self._requests.get(request_id, {}).get(item)
        return state.parts.get(part) if state else None

    def _is_stale(self, attempt: int, newest: int) -> bool:
        return attempt <= newest

    def _open(
        self, request_id: str, item: int, part: PartState, source: Source, attempt: int
    ) -> None:
        fetch = Fetch(self._new_id(), request_id, item, part.part, part.rows, attempt, source)
        self._fetches[fetch.fetch_id] = fetch
        part.candidates.append(fetch)
        digest = self._requests[request_id][item].digest
        self._commands.append(
            Open(fetch.fetch_id, request_id, item, part.part, digest, part.rows, source, attempt)
        )

    def _emit_grants(self, fetch_id: bytes, segment: int, slots: list[Slot]) -> None:
        fetch = self._fetches[fetch_id]
        for at in range(0, len(slots), self._grant_pages):
            some = slots[at : at + self._grant_pages]
            fetch.num_grants += 1
            fetch.grants[fetch.num_grants] = (segment, some)
            fetch.num_rows_granted += sum(len(slot.rows) for slot in some)
            destinations = destinations_of(some, self._row_bytes)
            self._commands.append(Grant(fetch_id, segment, fetch.num_grants, destinations))

    def _on_ready(self, fetch: Fetch, ready: Ready) -> None:
        part = self._part(fetch.request_id, fetch.item, fetch.part)
        if not fetch.live or part is None:
            self.counters.stale_events += 1
            return
        refusal = fetch.refusal(ready)
        if self._format not in (None, ready.format) or ready.format.row_bytes != self._row_bytes:
            refusal = f"rows of another format: {ready.format}"
        if refusal is not None:
            self.counters.refused_ready += 1
            self._lose(fetch, Cause.LOST, refusal)
            return
        fetch.segments[ready.segment] = ready.rows
        self._win(fetch, part)

    def _win(self, fetch: Fetch, part: PartState) -> None:
        """It has rows of its part, and is the first that has."""
        fetch.state = FetchState.ACTIVE
        for other in tuple(part.candidates):
            if other is not fetch:
                self._end(other)

    def _on_landed(self, fetch: Fetch, landed: Landed) -> None:
        segment, slots = fetch.grants.get(landed.seq, (None, []))
        if not fetch.live or segment != landed.segment:
            self.counters.stale_events += 1
            return
        if landed.bank != HOST_BANK and landed.seq <= fetch.num_grants_lost:
            self._lose(fetch, Cause.PREEMPTED, "the rank whose memory it was is gone")
            return
        del fetch.grants[landed.seq]
        item = self._requests[fetch.request_id][fetch.item]
        if fetch.state is FetchState.OPENING:
            self._win(fetch, item.parts[fetch.part])
        for slot in slots:
            self._pool.land(slot.page)
            slot.land(landed.bank * self._bank_rows)
        for slot in item.rows.consume(item.rows.consumed):
            self._pool.free(slot.page)
        self._settle(fetch.request_id, fetch.item)

    def _on_broken(self, fetch: Fetch) -> None:
        self._lose(fetch, Cause.LOST, "the stream to the encoder broke", cancel=False)
        if fetch.state is FetchState.BROKEN:
            self.counters.stale_events += 1
        elif not fetch.grants:  # it was never told of a page it could still write to
            self._forget(fetch)
        else:
            fetch.state = FetchState.BROKEN
            for slot in fetch.slots:
                self._pool.quarantine(slot.page)
            source = fetch.source
            self._commands.append(Fence(fetch.fetch_id, source.endpoint, source.encoder_epoch))

    def _recall(self, request_id: str, index: int, slots: Sequence[Slot], used: Span) -> None:
        """Rows have to come again: those in these slots, or on their way to them, and used ones."""
        item = self._requests[request_id][index]
        gone = [used, *(slot.rows for slot in slots)]
        for slot in slots:
            if slot.landed:  # others stay with their fetch, which ends
                item.rows.remove(slot)
                self._pool.free(slot.page)
        for part in item.parts.values():
            if any(len(part.rows.intersect(span)) for span in gone):
                for fetch in tuple(part.candidates):
                    self._end(fetch)
                self._report(request_id, index, part, Cause.PREEMPTED, "preempted")
        item.landed_told = item.rows.complete

    def _settle(self, request_id: str, index: int) -> None:
        """Ends the fetches of parts that need no more rows; tells once when the item is whole."""
        item = self._requests[request_id][index]
        for part in item.parts.values():
            if part.candidates and item.rows.has_all(part.rows):
                for fetch in tuple(part.candidates):
                    # An encoder that was granted everything ends by itself.
                    self._end(fetch, cancel=fetch.num_rows_granted < len(part.rows))
        if item.rows.complete and not item.landed_told:
            item.landed_told = True
            self._notices.append(ItemLanded(request_id, index))

    def _lose(self, fetch: Fetch, cause: Cause, message: str, *, cancel: bool = True) -> None:
        """A live fetch will not bring its rows; the part is lost when it was the last one."""
        if not fetch.live:
            return
        self._end(fetch, cancel=cancel)
        part = self._part(fetch.request_id, fetch.item, fetch.part)
        assert part is not None, "a live fetch of no part"
        if not part.candidates:
            self._report(fetch.request_id, fetch.item, part, cause, message)

    def _report(
        self, request_id: str, item: int, part: PartState, cause: Cause, message: str
    ) -> None:
        if part.attempt > part.lost_attempt:
            part.lost_attempt = part.attempt
            self._notices.append(
                PartLost(request_id, item, part.part, part.attempt, cause, message)
            )

    def _end(self, fetch: Fetch, *, cancel: bool = True) -> None:
        """Rows are not wanted from this fetch any more; its pages stay with it until it is over."""
        item = self._requests[fetch.request_id][fetch.item]
        item.parts[fetch.part].candidates.remove(fetch)
        for slot in fetch.slots:
            item.rows.remove(slot)
        fetch.state = FetchState.ENDING
        opens = (c for c in self._commands if isinstance(c, Open) and c.fetch_id == fetch.fetch_id)
        if (unsent := next(opens, None)) is not None:
            self._commands.remove(unsent)
            self._forget(fetch)
        elif cancel:
            self._commands.append(Cancel(fetch.fetch_id))

    def _forget(self, fetch: Fetch) -> None:
        """Nothing of the fetch can be written any more."""
        for slot in fetch.slots:
            self._pool.free(slot.page)
        del self._fetches[fetch.fetch_id]
