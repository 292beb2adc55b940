"""What waits for one reader, who takes all of it at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """Unbounded, in order. One task takes; whoever puts wakes it once, however much there is."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._waiting: asyncio.Future[None] | None = None
        self._attendant: Callable[[list[T]], None] | None = None

    def attend(self, attendant: Callable[[list[T]], None] | None) -> None:
        """While the reader waits, what has come is shown to `attendant` before it is woken.

        It takes from the list what it has seen to. Called by the loop, so that what it raises is
        nobody's but the reader's: who finds there what it was raised about.
        """
        self._attendant = attendant

    def put(self, item: T) -> None:
        """Adds one."""
        self._items.append(item)
        waiting = self._waiting
        if waiting is None or waiting.done():
            return
        if self._attendant is None:
            waiting.set_result(None)
        elif len(self._items) == 1:
            waiting.get_loop().call_soon(self._show)

    async def take(self) -> list[T]:
        """All there is, once there is any."""
        while not self._items:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        items, self._items = self._items, []
        return items

    def _show(self) -> None:
        waiting = self._waiting
        if waiting is None or waiting.done():  # it was cancelled
            return
        try:
            if self._attendant is not None:
                self._attendant(self._items)
        finally:
            if self._items:
                waiting.set_result(None)
