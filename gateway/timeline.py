"""One request's clock: its deadline, and where its time went."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from chiasm.errors import DeadlineExceeded
from gateway.messages import Timings


class Timeline:
    """Starts when it is made.

    Args:
        timeout_s: Seconds the request has in all.
    """

    def __init__(self, timeout_s: float) -> None:
        self._began = time.monotonic()
        self._until = self._began + timeout_s
        self._spans: dict[str, float] = {}

    def remaining_s(self) -> float:
        """What is left. Raises DeadlineExceeded when nothing is."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("the request's time is up")
        return left

    def now(self) -> float:
        """The clock, in seconds."""
        return time.monotonic()

    def since_ms(self, moment: float) -> float:
        """Milliseconds since what `now` said."""
        return (time.monotonic() - moment) * 1e3

    @asynccontextmanager
    async def enforced(self) -> AsyncIterator[None]:
        """What runs inside is cancelled at the deadline. Never hold it over a `yield`.

        Raises:
            DeadlineExceeded: Then, or at once when it has passed.
        """
        try:
            async with asyncio.timeout(self.remaining_s()):
                yield
        except TimeoutError:
            raise DeadlineExceeded("the request's time is up") from None

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Adds the time inside to a span of `Timings`."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.add(name, (time.monotonic() - began) * 1e3)

    def add(self, name: str, milliseconds: float) -> None:
        """Adds to a span of `Timings`."""
        self._spans[name] = self._spans.get(name, 0.0) + milliseconds

    def mark(self, name: str) -> None:
        """Sets a span to the time since the beginning, the first time it is called."""
        self._spans.setdefault(name, (time.monotonic() - self._began) * 1e3)

    def timings(self) -> Timings:
        """All spans so far, in milliseconds."""
        return Timings(**{name: round(value, 3) for name, value in self._spans.items()})
