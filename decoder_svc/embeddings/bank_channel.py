"""What the engine's process and the rank that rows are written to say to each other.

Plain values in msgpack over a pipe of their own: what arrives is known without a look at steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import msgpack

from chiasm.transport.base import Region


@dataclass(frozen=True, slots=True)
class At:
    """From the rank: its memory can be written by way of this agent, until the next `At`."""

    agent_name: str
    metadata: bytes
    address: int
    length: int
    memory_type: str
    device: int

    @property
    def region(self) -> Region:
        """The memory."""
        return Region(self.address, self.length, self.memory_type, self.device)


@dataclass(frozen=True, slots=True)
class Heard:
    """From the rank: what writers have notified."""

    notices: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Await:
    """To the rank: so many notifications are expected in all."""

    count: int


@dataclass(frozen=True, slots=True)
class Renew:
    """To the rank: replace the agent, then say where it is."""


Message = At | Heard | Await | Renew

_TAGS: dict[type[Message], str] = {At: "a", Heard: "h", Await: "w", Renew: "r"}
_KINDS = {tag: kind for kind, tag in _TAGS.items()}


def say(channel: Connection, message: Message) -> None:
    """Sends. Raises OSError when the other end is gone."""
    fields = [getattr(message, name) for name in type(message).__dataclass_fields__]
    channel.send_bytes(msgpack.packb((_TAGS[type(message)], *fields)))


def hear(channel: Connection) -> Message:
    """Waits for a message. Raises EOFError or OSError when the other end is gone."""
    tag, *fields = msgpack.unpackb(channel.recv_bytes(), use_list=False)
    return _KINDS[tag](*fields)


class BankPort:
    """Hands channels to new ranks from the thread that starts these to the one that listens."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest: Connection | None = None
        self._listener: Callable[[Connection], None] | None = None

    def put(self, channel: Connection) -> None:
        """A rank has been started."""
        with self._lock:
            if self._listener is None:
                self._latest = channel
            else:
                self._listener(channel)

    def listen(self, listener: Callable[[Connection], None]) -> None:
        """Calls it with every channel, the latest first; from the thread that starts ranks."""
        with self._lock:
            self._listener = listener
            if self._latest is not None:
                listener(self._latest)
