"""Between the engine's thread and all others: commands and transfers in, events and load out."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from decoder_svc.embeddings.events import FetchCommand, FetchEvent
from decoder_svc.engine.messages import Command, EngineLoad, StepEvents

Item = Command | FetchEvent


class Outbox(Protocol):
    """Takes in what the engine has to say. Called from the engine's thread; must not block."""

    def __call__(
        self,
        events: StepEvents,
        commands: Sequence[FetchCommand],
        load: EngineLoad,
    ) -> None:
        """Events, transfer commands, and the load after them."""


class Mailbox:
    """Any thread puts, the engine's thread drains and sends.

    Args:
        outbox: Gets what the engine has to say.
    """

    def __init__(self, outbox: Outbox) -> None:
        self.send = outbox
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

    def items(self) -> Iterator[Item]:
        """Takes what is there, one by one: what follows an item that fails is not lost with it."""
        self._filled.clear()
        while self._items:
            yield self._items.popleft()
