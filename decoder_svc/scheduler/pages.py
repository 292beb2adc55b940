"""Which pages a sequence has, gets, shares and gives back. The scheduler's only way to the pool.

A page is written by one sequence until it is full; only full pages are shared, so nothing shared is
written. What does not fill a page is computed again by whoever joins.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from decoder_svc.engine.counts import Ints
from decoder_svc.engine.request import Request, Sequence, State
from decoder_svc.kv_cache.block_pool import BlockPool
from decoder_svc.kv_cache.prefix import PrefixIndex, block_key
from decoder_svc.scheduler.budget import Limits
from decoder_svc.scheduler.policy import Queue
from decoder_svc.scheduler.seats import Seats


@dataclass(frozen=True, slots=True)
class Found:
    """Pages that hold a sequence's beginning already; not retained yet."""

    blocks: tuple[int, ...]
    num_tokens: int


class PageTable:
    """Owns the pool and the prefix index.

    Args:
        pool: Pages.
        prefix: Finds shared beginnings; None = off.
        limits: How large a page is.
        seats: Of who is in the batch.
    """

    def __init__(
        self, pool: BlockPool, prefix: PrefixIndex | None, limits: Limits, seats: Seats
    ) -> None:
        self._pool = pool
        self._prefix = prefix
        self._limits = limits
        self._seats = seats
        self._size = limits.block_size

    @property
    def usage(self) -> float:
        """Pages held over pages in all."""
        return self._pool.num_held / self._pool.num_blocks

    def num_shareable(self, request: Request) -> int:
        """Prompt tokens on full pages, leaving at least one token to compute."""
        return (len(request.prompt) - 1) // self._size * self._size

    def find(self, sequence: Sequence) -> Found:
        """The longest beginning to be had from the prefix index or a running sibling."""
        most = (sequence.num_tokens - 1) // self._size
        best: list[int] = []
        if self._prefix is not None:
            self._learn_keys(sequence, most)
            best = self._prefix.match(sequence.block_keys[:most])
        for sibling in sequence.request.sequences:
            if sibling is not sequence and sibling.state is State.RUNNING:
                full = min(sibling.computed, len(sequence.request.prompt)) // self._size
                if min(full, most) > len(best):
                    best = sibling.blocks[: min(full, most)]
        return Found(tuple(best), len(best) * self._size)

    def fits(self, sequence: Sequence, found: Found, running: Queue) -> bool:
        """Whether pages last for this sequence's tokens beside those promised to running ones."""
        promised = self._seats.counts.num_pages_missing(running.seats, self._size)
        promised += sum(self._tails(s.request) for s in self._seats.parents(running))
        free = self._pool.num_free - self._pool.num_revived(found.blocks)
        wanted = self._limits.pages(sequence.num_tokens + sequence.num_drawing + 1)
        own = max(0, wanted - len(found.blocks)) + self._tails(sequence.request)
        return own <= free - promised

    def attach(self, sequence: Sequence, found: Found) -> None:
        """Takes the found pages."""
        self._pool.retain(found.blocks)
        sequence.attach(list(found.blocks), found.num_tokens)

    def share(self, leader: Sequence, sibling: Sequence, num_tokens: int) -> None:
        """Gives a sibling the leader's first pages."""
        assert num_tokens % self._size == 0, "only full pages are shared"
        self.attach(sibling, Found(tuple(leader.blocks[: num_tokens // self._size]), num_tokens))

    def grow_each(self, at: Ints) -> bool:
        """As `grow` by a token each, for whoever has these seats."""
        counts = self._seats.counts
        full = at[counts.scheduled[at] >= counts.pages[at] * self._size]
        if len(full) > self._pool.num_free:
            return False
        blocks = self._pool.allocate(len(full))
        for sequence, block in zip(self._seats.holders(full), blocks, strict=True):
            sequence.blocks.append(block)
        counts.pages[full] += 1
        counts.newest_page[full] = blocks
        return True

    def grow(self, sequence: Sequence, length: int) -> bool:
        """Sees to pages for `length` tokens more; False, nothing taken, when too few are free."""
        need = self._limits.pages(sequence.num_scheduled + length) - len(sequence.blocks)
        if need > self._pool.num_free:
            return False
        if need > 0:
            sequence.extend(self._pool.allocate(need))
        return True

    def room(self, sequence: Sequence) -> int:
        """Tokens that fit on what the sequence has and what is free."""
        return (len(sequence.blocks) + self._pool.num_free) * self._size - sequence.num_scheduled

    def publish(self, sequence: Sequence) -> None:
        """Lets others find the pages that are full now."""
        self._publish_until(sequence, sequence.computed // self._size)

    def publish_each(self, at: Ints) -> None:
        """As `publish`, for those with these seats whom one token more can have given a full page.

        Of those that have finished nothing is told any more.
        """
        counts = self._seats.counts
        pages, rest = np.divmod(counts.scheduled[at] - counts.in_flight[at], self._size)
        has_filled = (rest == 0) & (counts.is_over[at] == 0)
        filled = zip(self._seats.holders(at[has_filled]), pages[has_filled].tolist(), strict=True)
        for sequence, full in filled:
            self._publish_until(sequence, full)

    def drop(self, sequence: Sequence) -> None:
        """Gives every page back; what is cached can still be found until it is overwritten."""
        self._pool.release(sequence.blocks)
        sequence.attach([], 0)

    def condemn(self, sequence: Sequence) -> None:
        """Nobody finds its pages again, those that others filled included: it has read them all."""
        if self._prefix is not None:
            self._prefix.forget(sequence.blocks)

    def forget(self) -> None:
        """Nobody finds a page again: what they held is lost."""
        if self._prefix is not None:
            self._prefix.clear()

    def check(self, holders: Iterable[Sequence]) -> None:
        """Raises AssertionError unless every hold on a page is some sequence's, and covers it."""
        self._pool.check()
        if self._prefix is not None:
            self._prefix.check()
        counts: dict[int, int] = {}
        for sequence in holders:
            assert len(sequence.blocks) >= self._limits.pages(sequence.computed), "tokens off pages"
            for block in sequence.blocks:
                counts[block] = counts.get(block, 0) + 1
        assert counts == self._pool.holders(), "pages held by nobody, or by more than are counted"

    def _tails(self, request: Request) -> int:
        """Pages to come for what parked siblings do not share."""
        parked = request.num_parked
        if not parked:
            return 0
        return parked * self._limits.pages(len(request.prompt) + 1 - self.num_shareable(request))

    def _publish_until(self, sequence: Sequence, full: int) -> None:
        first = sequence.num_published
        if self._prefix is None or full <= first:
            return
        self._learn_keys(sequence, full)
        for index in range(first, full):
            self._prefix.insert(sequence.block_keys[index], sequence.blocks[index])
        sequence.num_published = full

    def _learn_keys(self, sequence: Sequence, count: int) -> None:
        """Sees to the keys of the first `count` pages, which are full."""
        keys, media = sequence.block_keys, sequence.request.media
        while len(keys) < count:
            begin = len(keys) * self._size
            before = keys[-1] if keys else sequence.request.root_key
            keys.append(block_key(before, sequence.tokens(begin, begin + self._size), begin, media))
