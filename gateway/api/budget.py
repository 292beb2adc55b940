"""Request bodies held in memory, all together: over the limit is 429 as the body comes in."""

from __future__ import annotations

from chiasm.errors import ResourceExhausted


class ByteBudget:
    """Counts bytes against a limit.

    Args:
        limit: Most bytes at once.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.held = 0

    def lease(self) -> ByteLease:
        """An empty share of it."""
        return ByteLease(self)

    def take(self, num_bytes: int) -> None:
        """Counts bytes. Raises ResourceExhausted when they do not fit."""
        if self.held + num_bytes > self._limit:
            raise ResourceExhausted(
                "the server holds as many request bytes as it may", retry_after_s=1.0
            )
        self.held += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Counts bytes no more."""
        self.held -= num_bytes
        assert self.held >= 0, "more given back than taken"


class ByteLease:
    """One request's share, given back as a whole."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._held = 0

    def add(self, num_bytes: int) -> None:
        """Takes more. Raises ResourceExhausted."""
        self._budget.take(num_bytes)
        self._held += num_bytes

    def close(self) -> None:
        """Gives everything back; may be called twice."""
        self._budget.give_back(self._held)
        self._held = 0
