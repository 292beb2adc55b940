"""Turns: so much inside at once, so many waiting, tenant by tenant in turn, none for ever.

What stands at the front of a tenant's own line waits until it fits: large ones are not overtaken
for ever by small ones. Policy: no network, and time is an argument.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from chiasm.errors import ResourceExhausted

_FIRST_PACE_S = 0.1  # between two that leave, before any has
_PACE_WEIGHT = 0.1  # of the newest in the running mean
_LONGEST_HINT_S = 60.0


@dataclass(slots=True, eq=False)
class _Waiter:
    weight: int
    turn: asyncio.Future[None]


class Lane:
    """A bounded number inside and a bounded, fair line before it.

    Args:
        capacity: Units inside at once.
        max_waiting: Requests in the line.
        what: Of which there is too much, for the refusal.
        clock: Seconds.
    """

    def __init__(
        self,
        capacity: int,
        *,
        max_waiting: int,
        what: str = "requests",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.capacity = capacity
        self.inside = 0
        """Units."""
        self._limit = capacity  # what may be inside now; less while a service is full
        self._max_waiting = max_waiting
        self._what = what
        self._clock = clock
        self._lines: dict[Hashable, deque[_Waiter]] = {}  # the first line's turn is next
        self._pace_s = _FIRST_PACE_S
        self._last_left = clock()

    @property
    def waiting(self) -> int:
        """Requests in the line."""
        return sum(map(len, self._lines.values()))

    async def enter(
        self, tenant: Hashable, *, within_s: float, weight: int = 1, first: bool = False
    ) -> int:
        """Returns the units to give to `leave`; more than fit at all enter alone.

        Args:
            tenant: In whose line to stand.
            within_s: Longest wait.
            weight: Units.
            first: Stand at the front of the tenant's line: it has waited before.

        Raises:
            ResourceExhausted: The line is full, or the wait was too long.
        """
        weight = min(weight, self.capacity)
        if not self._lines and self._fits(weight):
            self.inside += weight
            return weight
        if not first and self.waiting >= self._max_waiting:
            raise self._refusal()
        waiter = _Waiter(weight, asyncio.get_running_loop().create_future())
        line = self._lines.setdefault(tenant, deque())
        if first:
            line.appendleft(waiter)
        else:
            line.append(waiter)
        self._admit()
        try:
            async with asyncio.timeout(within_s):
                await waiter.turn
        except TimeoutError:
            self._give_up(tenant, waiter)
            raise self._refusal() from None
        except asyncio.CancelledError:
            self._give_up(tenant, waiter)
            raise
        return weight

    def leave(self, weight: int = 1, *, refused: bool = False) -> None:
        """Makes room; the next in line enter.

        Args:
            weight: What `enter` returned.
            refused: A service was full: from now on no more inside than are left, and one more
                for each that leaves otherwise.
        """
        now = self._clock()
        self._pace_s += _PACE_WEIGHT * (now - self._last_left - self._pace_s)
        self._last_left = now
        self.inside -= weight
        limit = self.inside if refused else self._limit + 1
        self._limit = max(1, min(self.capacity, limit))
        self._admit()

    def resize(self, capacity: int) -> None:
        """Another capacity from now on."""
        self._limit = capacity if self._limit == self.capacity else min(self._limit, capacity)
        self.capacity = capacity
        self._admit()

    def check(self) -> None:
        """Nobody waits who could be inside, and no line is empty."""
        assert self.inside >= 0
        assert all(self._lines.values())
        if self._lines:
            front = next(iter(self._lines.values()))[0]
            assert front.turn.cancelled() or not self._fits(front.weight)

    def _fits(self, weight: int) -> bool:
        return not self.inside or self.inside + weight <= self._limit

    def _admit(self) -> None:
        """Lets in whose turn it is, and puts their line behind the others."""
        while self._lines:
            tenant, line = next(iter(self._lines.items()))
            if line[0].turn.cancelled():  # it goes away, and has not got round to saying so
                self._remove(tenant, line[0])
                continue
            if not self._fits(line[0].weight):
                return
            waiter = line.popleft()
            self._lines.pop(tenant)
            if line:
                self._lines[tenant] = line
            self.inside += waiter.weight
            waiter.turn.set_result(None)

    def _give_up(self, tenant: Hashable, waiter: _Waiter) -> None:
        if waiter.turn.done() and not waiter.turn.cancelled():  # it had just got its turn
            self.leave(waiter.weight)
        elif waiter in self._lines.get(tenant, ()):
            self._remove(tenant, waiter)
            self._admit()

    def _remove(self, tenant: Hashable, waiter: _Waiter) -> None:
        line = self._lines[tenant]
        line.remove(waiter)
        if not line:
            del self._lines[tenant]

    def _refusal(self) -> ResourceExhausted:
        hint_s = (self.waiting + 1) * max(self._pace_s, 0.0)
        return ResourceExhausted(
            f"the server takes no more {self._what} now",
            retry_after_s=float(min(_LONGEST_HINT_S, max(1, math.ceil(hint_s)))),
        )
