"""What other threads hand to the engine: commands of requests and events of transfers, in order."""

from __future__ import annotations

import threading
from collections import deque

from decoder_svc.embeddings.events import FetchEvent
from decoder_svc.engine.messages import Command

Item = Command | FetchEvent


class Inbox:
    """Any thread puts, the engine's thread drains."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._filled = threading.Event()

    def put(self, item: Item) -> None:
        """Hands one over; wakes the engine."""
        self._items.append(item)
        self._filled.set()

    def wake(self) -> None:
        """Wakes the engine for nothing."""
        self._filled.set()

    def wait(self, timeout_s: float) -> None:
        """Sleeps until there is something, at most so long."""
        self._filled.wait(timeout_s)

    def drain(self) -> list[Item]:
        """Everything that is there."""
        self._filled.clear()
        items = []
        while self._items:
            items.append(self._items.popleft())
        return items
