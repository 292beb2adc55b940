"""The orderly end: no new requests, those inside finish, and what is left at the end is told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from chiasm.errors import Unavailable


class Gate:
    """Counts requests inside. Used by both faces."""

    def __init__(self) -> None:
        self._inside: set[asyncio.Task[object]] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self.draining = False
        self.expired = False

    @property
    def num_inside(self) -> int:
        """Requests inside now."""
        return len(self._inside)

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Holds the gate open for the running task.

        A task that is cut off at the end of the drain leaves with Unavailable.

        Raises:
            Unavailable: The gateway is shutting down.
        """
        if self.draining:
            raise _closing()
        task = asyncio.current_task()
        assert task is not None, "runs inside a task"
        self._inside.add(task)
        self._empty.clear()
        try:
            yield
        except asyncio.CancelledError:
            if self.expired and task.uncancel() == 0:
                raise _closing() from None
            raise
        finally:
            self._inside.discard(task)
            if not self._inside:
                self._empty.set()

    async def drain(self, seconds: float) -> None:
        """Refuses new requests, waits for those inside, then cuts off the rest."""
        self.draining = True
        try:
            await asyncio.wait_for(self._empty.wait(), seconds)
        except TimeoutError:
            self.expired = True
            for task in list(self._inside):
                task.cancel()


def _closing() -> Unavailable:
    return Unavailable("the gateway is shutting down", retry_after_s=1.0)
