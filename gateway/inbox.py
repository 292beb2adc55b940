"""What waits for one reader, who takes all of it at once."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Inbox(Generic[T]):
    """Unbounded, in order. One task takes; whoever puts wakes it once, however much there is."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._waiting: asyncio.Future[None] | None = None

    def put(self, item: T) -> None:
        """Adds one."""
        self._items.append(item)
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def take(self) -> list[T]:
        """All there is, once there is any."""
        while not self._items:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        items, self._items = self._items, []
        return items
