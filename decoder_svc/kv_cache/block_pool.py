"""Who holds which page of K and V: ids and counts, no tensors.

A page is held (by one sequence or, when its tokens are shared, by several) or free. A free page may
still hold something the prefix index can find; such pages are taken last, the longest unused first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class BlockPool:
    """Hands out page ids.

    Args:
        num_blocks: Pages in all.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._holders = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached: set[int] = set()
        self._on_reuse: Callable[[int], None] = self._cached.discard

    def bind(self, on_reuse: Callable[[int], None]) -> None:
        """The prefix index asks to be told when a page it knows is about to be overwritten."""
        self._on_reuse = on_reuse

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can hand out."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Pages with at least one holder."""
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free pages; the caller has checked `num_free`."""
        assert count <= len(self._free), "allocate more pages than are free"
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            if block in self._cached:
                self._cached.discard(block)
                self._on_reuse(block)
            self._holders[block] = 1
            taken.append(block)
        return taken

    def retain(self, blocks: Iterable[int]) -> None:
        """One more holder each; a free page that is still cached comes back to life."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._free[block]
            self._holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less each, given in sequence order.

        Pages are freed from the last on, so that of a cached prompt the end is lost before the
        beginning; pages nobody can find again are the first to be taken.
        """
        for block in reversed(list(blocks)):
            assert self._holders[block] > 0, f"page {block} released more often than held"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
                if block not in self._cached:
                    self._free.move_to_end(block, last=False)

    def mark_cached(self, block: int) -> None:
        """The prefix index can find this page from now on."""
        assert self._holders[block] > 0, "only a held page has contents worth finding"
        self._cached.add(block)

    def unmark_cached(self, blocks: Iterable[int]) -> None:
        """The prefix index has forgotten these pages."""
        self._cached.difference_update(blocks)

    def is_cached(self, block: int) -> bool:
        """Whether the prefix index can find the page."""
        return block in self._cached

    def num_revived(self, blocks: Iterable[int]) -> int:
        """How many of these pages `retain` would take off the free list."""
        return sum(self._holders[block] == 0 for block in blocks)

    def holders(self) -> dict[int, int]:
        """How many hold each held page."""
        return {block: count for block, count in enumerate(self._holders) if count}

    def check(self) -> None:
        """Raises AssertionError unless free + held = total and every count is true."""
        held = sum(count > 0 for count in self._holders)
        assert held + len(self._free) == self.num_blocks, "pages leaked"
        assert all(self._holders[block] == 0 for block in self._free), "a free page is held"
        assert min(self._holders, default=0) >= 0, "a page has fewer than no holders"
