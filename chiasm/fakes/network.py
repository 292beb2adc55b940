"""A network without time: messages wait in links until a test delivers them, one by one.

Within a link the order is kept, across links there is none: the test chooses. That is what a set of
gRPC streams promises, and no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

M = TypeVar("M")


class Network:
    """Every message in flight."""

    def __init__(self) -> None:
        self.busy: list[Link[Any]] = []  # links with messages, in no particular order

    def link(self, deliver: Callable[[M], None]) -> Link[M]:
        """A new one-way link to `deliver`."""
        return Link(self, deliver)


class Link(Generic[M]):
    """One direction of one stream."""

    def __init__(self, network: Network, deliver: Callable[[M], None]) -> None:
        self._network = network
        self._deliver = deliver
        self._messages: deque[M] = deque()

    def send(self, message: M) -> None:
        """Puts a message in flight."""
        if not self._messages:
            self._network.busy.append(self)
        self._messages.append(message)

    def deliver(self) -> None:
        """Delivers the oldest message."""
        message = self._messages.popleft()
        if not self._messages:
            self._network.busy.remove(self)
        self._deliver(message)

    def drop(self) -> None:
        """Loses what is in flight."""
        if self._messages:
            self._messages.clear()
            self._network.busy.remove(self)
