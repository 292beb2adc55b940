"""The rest of a body of known length, read from the socket straight to where it is parsed.

A parser hands a body on in pieces, each copied several times, which costs more than to read it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_SCRATCH_BYTES = 64 << 10


class Filling(asyncio.BufferedProtocol):
    """Stands in for a connection's protocol until the body is there, or has gone by.

    Args:
        body: What is filled.
        begin: From where on.
        heard: Called when something has come.
        over: Called when the body's last byte has come.
        owner: The connection's protocol; hears of everything else.
    """

    def __init__(
        self,
        body: bytearray,
        begin: int,
        *,
        heard: Callable[[], None],
        over: Callable[[], None],
        owner: asyncio.Protocol,
    ) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._place: memoryview | None = memoryview(body)[begin:]
        self._left = len(self._place)
        self._heard = heard
        self._over = over
        self._owner = owner

    def drop(self) -> None:
        """Nobody wants the rest: it is read and forgotten."""
        self._place = None

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next piece goes."""
        if self._place is not None:
            return self._place[-self._left :]
        return memoryview(bytearray(min(self._left, _SCRATCH_BYTES)))

    def buffer_updated(self, nbytes: int) -> None:
        """A piece has come."""
        self._left -= nbytes
        if self._place is not None:
            self._heard()
        if not self._left:
            self.drop()
            self._over()
            if not self.done.done():
                self.done.set_result(None)

    def eof_received(self) -> bool | None:
        """No more will come."""
        return self._owner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self.drop()
        if not self.done.done():
            self.done.set_exception(ConnectionError("the client went away"))
        self._owner.connection_lost(exc)

    def pause_writing(self) -> None:
        """The client is slow to read."""
        self._owner.pause_writing()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._owner.resume_writing()
