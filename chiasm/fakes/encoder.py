"""An encoder without a tower: it keeps the contract of encoder.proto and makes up the rows."""

from __future__ import annotations

import asyncio
import secrets
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from chiasm.bundles import FEATURE, BundleServer
from chiasm.errors import EmbeddingLost, ResourceExhausted
from chiasm.fakes.rows import NAN_BYTE, pattern_rows
from chiasm.handshake import CONTRACT
from chiasm.plan import Cause, MediaPlan, Span
from chiasm.rows import RowFormat
from chiasm.v1 import common_pb2, encoder_pb2, encoder_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True)
class EncoderFaults:
    """What goes wrong; may be changed while the fake serves."""

    delay_s: float = 0.0  # before the rows are ready
    fail: Cause | None = None  # instead of rows
    judge: Callable[[MediaPlan, bytes], Awaitable[Cause | None]] | None = None  # decides `fail`
    message: str = "made to fail"
    exhausted: bool = False  # Encode is refused
    most_open: int | None = None  # so many Encodes are open at once; more are refused
    extra_rows: int = 0  # -1: one row too few becomes ready
    hidden_size: int | None = None  # Ready announces rows of another width
    non_finite: bool = False  # every value is a NaN
    break_after_chunks: int | None = None  # the Fetch stream dies


@dataclass(slots=True)
class _Entry:
    plan: MediaPlan
    rows: Span
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    failed: Cause | None = None
    ended: bool = False


class FakeEncoder(encoder_pb2_grpc.EncoderServicer):
    """Serves Encode, Fetch, Fence, Describe and WatchLoad.

    Args:
        row_format: What its rows look like; 8 float32 values by default.
        segment_rows: Most rows of one segment.
        description: What Describe answers; role, contract, epoch and rows are filled in.
        faults: What goes wrong.
        bundled: Whether it says that it takes many calls on one stream.
    """

    def __init__(
        self,
        *,
        row_format: RowFormat | None = None,
        segment_rows: int = 64,
        description: common_pb2.Description | None = None,
        faults: EncoderFaults | None = None,
        bundled: bool = True,
    ) -> None:
        self.bundled = bundled
        self.row_format = row_format or RowFormat(8, 1, "float32")
        self.segment_rows = segment_rows
        self.epoch = secrets.randbits(63) | 1
        self.description = description or common_pb2.Description()
        self.faults = faults or EncoderFaults()
        self.load = common_pb2.Load()
        self.encodes: list[encoder_pb2.EncodeStart] = []  # every start that came in
        self.media: dict[bytes, bytes] = {}  # by encode id
        self.open_encodes = 0
        self.open_fetches = 0
        self._entries: dict[bytes, _Entry] = {}
        self._arrived = asyncio.Condition()

    async def Encode(
        self, requests: AsyncIterator[encoder_pb2.EncodeRequest], context: Context
    ) -> AsyncIterator[encoder_pb2.EncodeResponse]:
        """Takes the media, reports every segment, then waits for the half-close."""
        start = (await anext(aiter(requests))).start
        self.encodes.append(start)
        full = self.faults.most_open is not None and self.open_encodes >= self.faults.most_open
        if full or self.faults.exhausted:
            raise ResourceExhausted("made to be full", retry_after_s=0.1)
        if start.encoder_epoch not in (0, self.epoch):
            raise EmbeddingLost("another life of this encoder was meant")
        plan = MediaPlan.from_proto(start.plan)
        rows = Span.from_proto(start.rows) if start.HasField("rows") else Span(0, plan.num_rows)
        entry = _Entry(plan, rows)
        self.open_encodes += 1
        try:
            async with self._arrived:
                self._entries[start.encode_id] = entry
                self._arrived.notify_all()
            yield encoder_pb2.EncodeResponse(
                accepted=encoder_pb2.EncodeAccepted(encoder_epoch=self.epoch, media_needed=True)
            )
            self.media[start.encode_id] = await _read_media(requests, plan.media_bytes)
            await asyncio.sleep(self.faults.delay_s)
            fail = self.faults.fail
            if self.faults.judge is not None:
                fail = await self.faults.judge(plan, self.media[start.encode_id])
            if fail is not None:
                entry.failed = fail
                entry.ready.set()
                yield encoder_pb2.EncodeResponse(error=self._error(fail))
                return
            entry.ready.set()
            for segment, span in enumerate(self._segments(entry)):
                yield encoder_pb2.EncodeResponse(
                    ready=encoder_pb2.EncodeReady(segment=segment, rows=span.to_proto())
                )
            yield encoder_pb2.EncodeResponse(done=encoder_pb2.EncodeDone(forward_ms=1.0))
            async for _ in requests:
                pass
        finally:
            self.open_encodes -= 1
            entry.ended = True
            if not entry.ready.is_set():
                entry.failed = Cause.LOST
                entry.ready.set()

    async def EncodeMany(
        self, requests: AsyncIterator[common_pb2.Bundle], context: Context
    ) -> AsyncIterator[common_pb2.Bundle]:
        """Many of them on one stream."""
        parse = encoder_pb2.EncodeRequest.FromString
        server = BundleServer(self.Encode, parse, method="EncodeMany")
        async with aclosing(server.serve(requests)) as bundles:
            async for bundle in bundles:
                yield bundle

    def forget(self) -> None:
        """Drops what it remembers of calls that have ended."""
        self.encodes.clear()
        for encode_id in [key for key, entry in self._entries.items() if entry.ended]:
            del self._entries[encode_id]
            self.media.pop(encode_id, None)

    async def made(self, encode_id: bytes) -> None:
        """Returns once the rows of an Encode are ready, or have failed."""
        await (await self._find(encode_id)).ready.wait()

    async def Fetch(
        self, requests: AsyncIterator[encoder_pb2.FetchRequest], context: Context
    ) -> AsyncIterator[encoder_pb2.FetchResponse]:
        """Waits for the encode id, reports what is ready, writes what is granted."""
        opening = (await anext(aiter(requests))).open
        self.open_fetches += 1
        try:
            entry = await self._find(opening.encode_id)
            yield encoder_pb2.FetchResponse(
                accepted=encoder_pb2.FetchAccepted(encoder_epoch=self.epoch)
            )
            await entry.ready.wait()
            if entry.failed is not None:
                yield encoder_pb2.FetchResponse(error=self._error(entry.failed))
            else:
                async for response in self._serve(entry, requests):
                    yield response
            yield encoder_pb2.FetchResponse(quiesced=encoder_pb2.FetchQuiesced())
        finally:
            self.open_fetches -= 1

    async def Fence(
        self, request: encoder_pb2.FenceRequest, context: Context
    ) -> encoder_pb2.FenceResponse:
        """Nothing is ever written but on a stream: any answer is true."""
        return encoder_pb2.FenceResponse(encoder_epoch=self.epoch)

    async def Describe(
        self, request: common_pb2.DescribeRequest, context: Context
    ) -> common_pb2.Description:
        """The description given, with role, contract, epoch and rows filled in."""
        answer = common_pb2.Description()
        answer.CopyFrom(self.description)
        answer.contract.CopyFrom(CONTRACT)
        answer.role = "encoder"
        answer.features.extend([FEATURE] if self.bundled else [])
        answer.epoch = self.epoch
        answer.rows.CopyFrom(self.row_format.to_proto())
        return answer

    async def WatchLoad(
        self, request: common_pb2.WatchLoadRequest, context: Context
    ) -> AsyncIterator[common_pb2.Load]:
        """The load as set by the test, again and again."""
        while True:
            yield self.load
            await asyncio.sleep(max(request.interval_ms, 10) / 1000)

    async def _find(self, encode_id: bytes) -> _Entry:
        """Waits for the Encode; one that has ended is still found, as what it ended as."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: encode_id in self._entries)
        return self._entries[encode_id]

    def _segments(self, entry: _Entry) -> list[Span]:
        end = entry.rows.end + self.faults.extra_rows
        return [
            Span(begin, min(begin + self.segment_rows, end))
            for begin in range(entry.rows.begin, end, self.segment_rows)
        ]

    async def _serve(
        self, entry: _Entry, requests: AsyncIterator[encoder_pb2.FetchRequest]
    ) -> AsyncIterator[encoder_pb2.FetchResponse]:
        segments = self._segments(entry)
        width = self.faults.hidden_size or self.row_format.hidden_size
        announced = replace(self.row_format, hidden_size=width)
        for index, span in enumerate(segments):
            yield encoder_pb2.FetchResponse(
                ready=encoder_pb2.FetchReady(
                    segment=index, rows=span.to_proto(), format=announced.to_proto()
                )
            )
        left = sum(len(span) for span in segments)
        chunks = seq = 0
        while left > 0:
            request = await anext(requests, None)
            if request is None or request.HasField("cancel"):
                return
            seq += 1
            crc = 0
            segment = segments[request.grant.segment]
            for place in request.grant.destinations:
                if chunks == self.faults.break_after_chunks:
                    raise EmbeddingLost("made to break")
                chunks += 1
                rows = Span.from_proto(place.rows)
                data = self._bytes(entry, rows)
                crc = zlib.crc32(data, crc)
                left -= len(rows)
                yield encoder_pb2.FetchResponse(
                    chunk=encoder_pb2.FetchChunk(
                        segment=request.grant.segment,
                        offset=(rows.begin - segment.begin) * self.row_format.row_bytes,
                        data=data,
                    )
                )
            yield encoder_pb2.FetchResponse(
                written=encoder_pb2.FetchWritten(segment=request.grant.segment, seq=seq, crc32=crc)
            )
        yield encoder_pb2.FetchResponse(done=encoder_pb2.FetchDone())

    def _bytes(self, entry: _Entry, rows: Span) -> bytes:
        if self.faults.non_finite:
            return NAN_BYTE * (len(rows) * self.row_format.row_bytes)
        return pattern_rows(entry.plan.digest, rows, self.row_format.row_bytes)

    def _error(self, cause: Cause) -> encoder_pb2.ItemError:
        return encoder_pb2.ItemError(cause=cause.to_proto(), message=self.faults.message)


async def _read_media(requests: AsyncIterator[encoder_pb2.EncodeRequest], size: int) -> bytes:
    media = bytearray()
    while len(media) < size:
        request = await anext(requests, None)
        if request is None:
            raise EmbeddingLost("the media ended early")
        media += request.chunk
    return bytes(media)
