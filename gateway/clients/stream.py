"""A bidirectional call with typed errors, one writer at a time, and an end that can be awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from copy import copy
from typing import Generic, Protocol, TypeVar, cast

import grpc

from chiasm.channel import being_cancelled, close_quietly, messages
from chiasm.errors import Cancelled, ChiasmError, Unavailable

Request = TypeVar("Request")
Response = TypeVar("Response")


class Duplex(Generic[Request, Response]):
    """Wraps a stream-stream call. Writes never raise: how the call ended is told by reading it."""

    def __init__(self, call: grpc.aio.StreamStreamCall[Request, Response]) -> None:
        self._call = call
        self._lock = asyncio.Lock()
        self._given_up: ChiasmError | None = None
        self.half_closed = False

    def on_end(self, callback: Callable[[], None]) -> None:
        """Called once the call has ended."""
        self._call.add_done_callback(lambda _: callback())

    def at_once(self, shortcut: Callable[[Response], bool]) -> None:
        """As at a bundle's call; here every message wakes the reader anyway."""

    async def send(self, message: Request) -> bool:
        """Writes one message; False when the call has ended or was half-closed."""
        async with self._lock:
            if self.half_closed or self._call.done():
                return False
            try:
                await self._call.write(message)
            except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
                return False
            except asyncio.CancelledError:
                if self._given_up is None or being_cancelled():
                    raise
                return False
            return True

    async def half_close(self) -> None:
        """Says that nothing more will be written. Idempotent."""
        async with self._lock:
            if self.half_closed:
                return
            self.half_closed = True
            if not self._call.done():
                # The call may end in the very moment: whoever reads it learns how.
                with suppress(asyncio.InvalidStateError, grpc.aio.InternalError):
                    await self._call.done_writing()

    async def __aiter__(self) -> AsyncIterator[Response]:
        """Responses until the peer ends the call.

        Raises:
            ChiasmError: As the peer meant it. A peer that cancels is going: Unavailable.
        """
        try:
            async for message in messages(self._call):
                yield cast(Response, message)  # read() is typed too widely
        except Cancelled as error:
            raise Unavailable("the peer cancelled the call") from error
        except asyncio.CancelledError:
            if self._given_up is None or being_cancelled():
                raise
            raise self._given_up from None

    def give_up(self, error: ChiasmError) -> None:
        """The peer does not answer any more: whoever reads gets `error`."""
        if not self._call.done():
            self._given_up = error
            self._call.cancel()

    async def close(self) -> None:
        """Cancels the call if it still runs."""
        await close_quietly(self._call)


class OpenStream(Protocol):
    """What is counted: a `Duplex`, or a call of a bundle."""

    def on_end(self, callback: Callable[[], None]) -> None:
        """Called once the call has ended."""

    def give_up(self, error: ChiasmError) -> None:
        """The peer does not answer any more."""


class OpenStreams:
    """The streams of one peer that have not ended."""

    def __init__(self) -> None:
        self._streams: set[OpenStream] = set()

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, stream: OpenStream) -> None:
        """Counts a stream until it is over."""
        self._streams.add(stream)
        stream.on_end(lambda: self._streams.discard(stream))

    def give_up(self, error: ChiasmError) -> None:
        """The peer does not answer any more."""
        for stream in tuple(self._streams):
            stream.give_up(copy(error))  # each raises its own, and holds what it was raised through
