"""Many calls on one stream, served: each runs as if it had come alone.

A gRPC message costs its reader 50 us and more, whatever is in it. A step of a decoder says a few
bytes to each of a hundred callers; in a bundle they are one message, and so is all else that is
said between two turns of the event loop. ADR 0020.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from chiasm.errors import ERROR_METADATA_KEY, DeadlineExceeded, InvalidRequest, ResourceExhausted
from chiasm.interceptors import guarded
from chiasm.v1 import common_pb2

FEATURE = "bundles"
"""What Describe says of a peer that takes calls in bundles."""

_MOST_UNREAD = 64 << 20  # bytes one call has not taken in
_PATIENCE_S = 0.005  # of the word that a call has ended well: it goes with others
_MOST_UNSENT = 4 << 20  # bytes of answers; beyond, the calls wait

Behaviour = Callable[[AsyncIterator[Any], Any], AsyncIterator[Message]]
"""A servicer's method of a stream-stream rpc."""


Parser = Callable[[bytes], Message]
"""Reads a request of the calls."""

Unsent = Callable[[int, bytes], bool]
"""Adds a message of a call to the next bundle, if there is room."""


class BundledCall:
    """One call, and what its servicer takes for a context: only what is here is there."""

    def __init__(self, number: int, parse: Parser, unsent: Unsent) -> None:
        self.number = number
        self.error: common_pb2.ErrorDetail | None = None
        """How it failed."""
        self.task: asyncio.Task[None] | None = None
        self._parse = parse
        self._unsent = unsent
        self._inbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._unread = 0
        self._callbacks: list[Callable[[BundledCall], None]] = []

    async def requests(self) -> AsyncIterator[Message]:
        """What the caller says, until it half-closes. Raises InvalidRequest."""
        while (data := await self._inbox.get()) is not None:
            self._unread -= len(data)
            try:
                message = self._parse(data)
            except DecodeError as error:
                raise InvalidRequest("a message cannot be read") from error
            yield message

    def take(self, strand: common_pb2.Strand) -> None:
        """The caller says something. Raises ResourceExhausted when nobody has listened for long."""
        if strand.HasField("message"):
            self._unread += len(strand.message)
            if self._unread > _MOST_UNREAD:
                raise ResourceExhausted("more was sent than could be taken in")
            self._inbox.put_nowait(strand.message)
        if strand.end:
            self._inbox.put_nowait(None)

    def write_now(self, data: bytes) -> bool:
        """Says a serialized answer while the behaviour waits for something else.

        What a step says to a hundred calls would else wake a hundred tasks.

        Returns:
            False when answers have to wait: it has not been said.
        """
        return self._unsent(self.number, data)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """As a context's: called when the call is over."""
        self._callbacks.append(callback)

    def over(self) -> None:
        """It has ended, however."""
        for callback in self._callbacks:
            callback(self)

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: tuple[tuple[str, bytes], ...] = (),
    ) -> None:
        """As a context's: the call fails with the error in the metadata."""
        detail = dict(trailing_metadata)[ERROR_METADATA_KEY]
        self.error = common_pb2.ErrorDetail.FromString(detail)
        raise grpc.aio.AbortError(code, details)


class BundleServer:
    """The calls of one stream.

    Args:
        behaviour: Serves each.
        parse: Reads their requests.
        method: For logs.
    """

    def __init__(self, behaviour: Behaviour, parse: Parser, *, method: str) -> None:
        self._behaviour = guarded(behaviour, method)
        self._parse = parse
        self._calls: dict[int, BundledCall] = {}
        self._newest = 0
        self._unsent = common_pb2.Bundle()
        self._unsent_bytes = 0
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    async def serve(
        self, bundles: AsyncIterator[common_pb2.Bundle]
    ) -> AsyncGenerator[common_pb2.Bundle, None]:
        """What the calls answer, until the caller goes, or ends the stream and all its calls."""
        reader = asyncio.create_task(self._read(bundles))
        reader.add_done_callback(lambda _: self._news.set())
        try:
            while self._calls or self._unsent.strands or not reader.done():
                await self._news.wait()
                self._news.clear()
                if self._unsent.strands:
                    bundle, self._unsent, self._unsent_bytes = self._unsent, common_pb2.Bundle(), 0
                    self._room.set()
                    yield bundle
            reader.result()
        finally:
            tasks = [reader, *(call.task for call in self._calls.values() if call.task)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, bundles: AsyncIterator[common_pb2.Bundle]) -> None:
        async for bundle in bundles:
            for strand in bundle.strands:
                self._take(strand)

    def _take(self, strand: common_pb2.Strand) -> None:
        """Strands of calls that are over are nobody's."""
        call = self._calls.get(strand.call)
        if call is None:
            if strand.call <= self._newest or not strand.HasField("message"):
                return
            self._newest = strand.call
            call = self._calls[strand.call] = BundledCall(strand.call, self._parse, self._add)
            call.task = asyncio.create_task(self._run(call, strand.timeout_s or None))
            # A callback, since a task that is cancelled before its first step runs nothing at all.
            call.task.add_done_callback(lambda _: self._ended(call))
        assert call.task is not None
        if strand.cancelled:
            call.task.cancel()
            return
        try:
            call.take(strand)
        except ResourceExhausted as error:
            call.error = error.detail()
            call.task.cancel()

    async def _run(self, call: BundledCall, timeout_s: float | None) -> None:
        try:
            async with (
                asyncio.timeout(timeout_s),
                aclosing(self._behaviour(call.requests(), call)) as responses,
            ):
                async for response in responses:
                    self._say(call.number, response.SerializeToString())
                    await self._room.wait()
        except TimeoutError:
            call.error = DeadlineExceeded("the call's time is up").detail()
        except grpc.aio.AbortError:
            assert call.error is not None, "abort has said why"

    def _ended(self, call: BundledCall) -> None:
        del self._calls[call.number]
        call.over()
        self._unsent.strands.add(call=call.number, end=True, error=call.error)
        if call.error is None and len(self._unsent.strands) == 1:
            asyncio.get_running_loop().call_later(_PATIENCE_S, self._news.set)
        else:
            self._news.set()

    def _say(self, number: int, data: bytes) -> None:
        self._unsent.strands.add(call=number, message=data)
        self._unsent_bytes += len(data)
        if self._unsent_bytes > _MOST_UNSENT:
            self._room.clear()
        self._news.set()

    def _add(self, number: int, data: bytes) -> bool:
        if not self._room.is_set():
            return False
        self._say(number, data)
        return True
