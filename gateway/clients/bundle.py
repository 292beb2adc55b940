"""Many calls to one peer on one stream: what is said at once travels as one message. ADR 0020.

Each call looks like a `Duplex`. The other end is `chiasm.bundles`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from copy import copy
from typing import Any, Generic, cast

import grpc
from google.protobuf.message import DecodeError, Message

from chiasm.channel import being_cancelled, messages
from chiasm.errors import Cancelled, ChiasmError, DeadlineExceeded, Unavailable, from_detail
from chiasm.v1 import common_pb2
from gateway.clients.framing import Buffers, field_head, size_of
from gateway.clients.stream import Request, Response

_MOST_BYTES = 1 << 20  # of a bundle, unless a single strand has more
_LARGE_BYTES = 64 << 10  # who sends so much waits until it is on its way
_PATIENCE_S = 0.005  # of what need not be said at once: it goes with what must

_STRANDS = common_pb2.Bundle.STRANDS_FIELD_NUMBER
_MESSAGE = common_pb2.Strand.MESSAGE_FIELD_NUMBER

BundleCall = grpc.aio.StreamStreamCall[bytes, common_pb2.Bundle]


class BundledStream(Generic[Request, Response]):
    """One call of a bundle. Writes never raise: how the call ended is told by reading it."""

    def __init__(
        self, bundle: Bundle, number: int, parse: Callable[[bytes], Response], timeout_s: float
    ) -> None:
        self.half_closed = False
        self._bundle = bundle
        self._number = number
        self._parse = parse
        self._head = common_pb2.Strand(call=number)
        self._first = common_pb2.Strand(call=number, timeout_s=timeout_s)
        self._inbox: deque[Response] = deque()
        self._reading: asyncio.Future[None] | None = None
        self._sending: asyncio.Future[None] | None = None
        self._shortcut: Callable[[Response], bool] | None = None
        self._over = False
        self._error: ChiasmError | None = None
        self._on_end: list[Callable[[], None]] = []
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._expire)

    def on_end(self, callback: Callable[[], None]) -> None:
        """Called once the call has ended."""
        self._on_end.append(callback)

    def at_once(self, shortcut: Callable[[Response], bool]) -> None:
        """What comes while the reader waits is offered here first; True: it is dealt with."""
        self._shortcut = shortcut

    async def send(self, message: Request | Buffers) -> bool:
        """Writes one message; False when the call has ended or was half-closed."""
        if self._over or self.half_closed:
            return False
        buffers = message if isinstance(message, tuple) else (_serialized(message),)
        size = size_of(buffers)
        head, self._first = self._first, self._head
        strand = (head.SerializeToString(), field_head(_MESSAGE, size), *buffers)
        if size <= _LARGE_BYTES:
            self._bundle.post(strand)
            return True
        self._sending = asyncio.get_running_loop().create_future()
        self._bundle.post(strand, self._sending)
        await self._sending
        return not self._over

    async def half_close(self) -> None:
        """Says that nothing more will be written. Idempotent."""
        if not self.half_closed and not self._over:
            self.half_closed = True
            self._say(common_pb2.Strand(call=self._number, end=True), soon=False)

    async def __aiter__(self) -> AsyncIterator[Response]:
        """Responses until the peer ends the call. Raises ChiasmError, as the peer meant it."""
        while True:
            while self._inbox:
                yield self._inbox.popleft()
            if self._over:
                break
            self._reading = asyncio.get_running_loop().create_future()
            await self._reading
        if self._error is not None:
            raise self._error

    def give_up(self, error: ChiasmError) -> None:
        """The peer does not answer any more: whoever reads gets `error`."""
        self._cancel(error, soon=True)

    async def close(self) -> None:
        """Cancels the call if it still runs. Most have said all by then: it goes with others."""
        self._cancel(Cancelled("the call was closed"), soon=False)

    def take(self, strand: common_pb2.Strand) -> None:
        """From the bundle: the peer says something."""
        if data := strand.message:
            try:
                message = self._parse(data)
            except DecodeError:
                self.give_up(Unavailable("the stream broke"))
                return
            # In order: what comes while the reader is busy, or has more to read, waits for it.
            idle = self._reading is not None and not self._reading.done()
            if not (idle and self._shortcut is not None and self._shortcut(message)):
                self._inbox.append(message)
                _wake(self._reading)
        if strand.end and not self._over:
            self.finish(from_detail(strand.error) if strand.HasField("error") else None)

    def finish(self, error: ChiasmError | None) -> None:
        """The call has ended. From the bundle: because the bundle has."""
        self._over = True
        self._error = error
        self._timer.cancel()
        self._bundle.forget(self._number)
        for future in (self._reading, self._sending):
            _wake(future)
        self._shortcut = None
        callbacks, self._on_end = self._on_end, []
        for callback in callbacks:
            callback()

    def _cancel(self, error: ChiasmError, *, soon: bool) -> None:
        if not self._over:
            self._say(common_pb2.Strand(call=self._number, cancelled=True), soon=soon)
            self.finish(error)

    def _say(self, strand: common_pb2.Strand, *, soon: bool) -> None:
        """Of a call the peer knows of."""
        if self._first is self._head:
            self._bundle.post((strand.SerializeToString(),), soon=soon)

    def _expire(self) -> None:
        self.give_up(DeadlineExceeded("the request's time is up"))


class Bundle:
    """All calls to one peer that share a stream. Made anew when the stream has broken.

    Args:
        call: The stream; it belongs to this bundle.
    """

    def __init__(self, call: BundleCall) -> None:
        self.broken = False
        self._call = call
        self._streams: dict[int, BundledStream[Any, Any]] = {}
        self._newest = 0
        self._unsent: deque[tuple[Buffers, asyncio.Future[None] | None]] = deque()
        self._news = asyncio.Event()
        self._tasks = (asyncio.create_task(self._read()), asyncio.create_task(self._write()))

    def open(
        self, parse: Callable[[bytes], Response], *, timeout_s: float
    ) -> BundledStream[Request, Response]:
        """Another call; its first message opens it."""
        self._newest += 1
        stream: BundledStream[Request, Response]
        stream = BundledStream(self, self._newest, parse, timeout_s)
        self._streams[self._newest] = stream
        return stream

    def post(
        self, strand: Buffers, sent: asyncio.Future[None] | None = None, *, soon: bool = True
    ) -> None:
        """Queues a strand; `sent` is resolved once it is on its way, or never will be."""
        if self.broken:
            _wake(sent)
            return
        self._unsent.append((strand, sent))
        if soon:
            self._news.set()
        elif len(self._unsent) == 1:
            asyncio.get_running_loop().call_later(_PATIENCE_S, self._news.set)

    def forget(self, number: int) -> None:
        """A call has ended."""
        self._streams.pop(number, None)

    async def close(self) -> None:
        """Ends every call."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self.broken:  # the reader had not begun
            self._break(Unavailable("the connection was closed"))
        self._call.cancel()

    async def _read(self) -> None:
        error: ChiasmError = Unavailable("the peer ended the stream of calls")
        try:
            async for bundle in messages(self._call):
                for strand in cast(common_pb2.Bundle, bundle).strands:  # read() is typed too widely
                    if (stream := self._streams.get(strand.call)) is not None:
                        stream.take(strand)
        except ChiasmError as failure:
            error = Unavailable(failure.message)  # of no single call
        except asyncio.CancelledError:
            error = Unavailable("the connection was closed")
            if being_cancelled():
                raise
        finally:
            self._break(error)

    def _break(self, error: ChiasmError) -> None:
        self.broken = True
        self._tasks[1].cancel()
        for _, sent in self._unsent:
            _wake(sent)
        self._unsent.clear()
        for stream in tuple(self._streams.values()):
            stream.finish(copy(error))  # each raises its own, and holds what it was raised through

    async def _write(self) -> None:
        """All that waits, as one message; a failure is told by reading."""
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                while self._unsent:
                    await self._write_some()
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            return

    async def _write_some(self) -> None:
        buffers: list[bytes | memoryview] = []
        waiting = []
        total = 0
        while self._unsent and (not buffers or total + size_of(self._unsent[0][0]) <= _MOST_BYTES):
            strand, sent = self._unsent.popleft()
            size = size_of(strand)
            buffers += (field_head(_STRANDS, size), *strand)
            total += size
            waiting.append(sent)
        try:
            await self._call.write(b"".join(buffers))
        finally:
            for sent in waiting:
                _wake(sent)


def _serialized(message: object) -> bytes:
    """A message on the wire."""
    assert isinstance(message, Message)
    return message.SerializeToString()


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
