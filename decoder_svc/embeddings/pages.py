"""The pages of the embedding slab: which are free, being written, landed, or in quarantine.

A page belongs to one grant at a time. It is free again only when nobody can write to it any more.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum


class PageState(StrEnum):
    """The life of a page: free -> writing -> landed -> free, or writing -> quarantined -> free."""

    FREE = "free"
    WRITING = "writing"
    LANDED = "landed"
    QUARANTINED = "quarantined"


class PagePool:
    """Counts pages and refuses illegal moves; holds no bytes.

    Args:
        num_pages: Pages of the slab.

    Raises:
        ValueError: None of them.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"a slab needs at least one page, got {num_pages}")
        self._states = [PageState.FREE] * num_pages
        # First in, first out: a page rests as long as possible before it is written again.
        self._free: deque[int] = deque(range(num_pages))

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return len(self._states)

    @property
    def num_free(self) -> int:
        """Pages that can be taken now."""
        return len(self._free)

    def count(self, state: PageState) -> int:
        """Pages in one state."""
        return self._states.count(state)

    def state(self, page: int) -> PageState:
        """The state of one page."""
        return self._states[page]

    def take(self) -> int:
        """A free page, for a grant that is about to be sent."""
        page = self._free.popleft()
        self._states[page] = PageState.WRITING
        return page

    def land(self, page: int) -> None:
        """The page's grant is complete: its writer is done with it."""
        assert self._states[page] is PageState.WRITING, f"page {page} is {self._states[page]}"
        self._states[page] = PageState.LANDED

    def quarantine(self, page: int) -> None:
        """The writer is out of sight: nobody may touch the page until it is fenced off."""
        assert self._states[page] is PageState.WRITING, f"page {page} is {self._states[page]}"
        self._states[page] = PageState.QUARANTINED

    def free(self, page: int) -> None:
        """Nobody reads the page, nobody can write to it."""
        assert self._states[page] is not PageState.FREE, f"page {page} is free already"
        self._states[page] = PageState.FREE
        self._free.append(page)

    def check(self) -> None:
        """Raises AssertionError unless free + writing + landed + quarantined = total."""
        assert sorted(self._free) == [
            page for page, state in enumerate(self._states) if state is PageState.FREE
        ], "the free list and the page states disagree"
