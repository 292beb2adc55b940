"""A real encoder servicer and a real fetcher over loopback, around an engine that makes up rows."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import torch

from chiasm.channel import connect, messages
from chiasm.config import EncoderConfig
from chiasm.errors import InvalidRequest
from chiasm.fakes import pattern_rows, serving
from chiasm.plan import Cause, MediaPlan, Modality, Part, Promise, Source, Span
from chiasm.rows import RowFormat
from chiasm.server import Server
from chiasm.telemetry import EncoderMetrics
from chiasm.transport import DRAM, OpenReceiver, Outbound, Receiver
from chiasm.transport.agent import TransferAgent
from chiasm.transport.grpc import StreamReceiver
from chiasm.transport.landing import LocalLanding
from chiasm.transport.nixl import NixlOutbound, NixlReceiver
from chiasm.v1 import common_pb2, encoder_pb2, encoder_pb2_grpc
from decoder_svc.embeddings.events import Demand, FetchEvent, Notice
from decoder_svc.embeddings.fetcher import Fetcher
from decoder_svc.embeddings.receiver import EmbeddingReceiver
from decoder_svc.embeddings.slab import Slab
from encoder_svc.arena import RowArena, TensorRows
from encoder_svc.geometry import segments_of
from encoder_svc.messages import EncodeJob, EncodeStats, RowBuffer, Sink
from encoder_svc.servicer import EncoderServicer
from tests.waiting import DEADLINE_S

FORMAT = RowFormat(16, 1, "float32")
ROW = FORMAT.row_bytes
PAGE_ROWS = 8
MOST_ROWS = 1 << 20


class PatternBuffer:
    """Rows that name their digest and index."""

    region = None

    def __init__(self, digest: bytes, rows: Span, row_bytes: int = ROW) -> None:
        self.num_rows = len(rows)
        self._row = row_bytes
        self._data = pattern_rows(digest, rows, row_bytes)

    @property
    def nbytes(self) -> int:
        return len(self._data)

    def read(self, begin: int, end: int) -> memoryview:
        return memoryview(self._data)[begin * self._row : end * self._row]


class Nixl:
    """The NIXL ends of an encoder and of a decoder, in place of the stream alone."""

    def __init__(self) -> None:
        self.agents: list[TransferAgent] = []

    def outbound(self, engine: PatternEngine) -> NixlOutbound:
        """Rows of that engine go into registered memory."""
        arena = RowArena(4 << 20, torch.device("cpu"))
        make = engine.make_buffer

        def kept(digest: bytes, rows: Span) -> TensorRows:
            data = bytearray(make(digest, rows).read(0, len(rows)))
            return arena.keep(torch.frombuffer(data, dtype=torch.uint8).view(len(rows), -1))

        engine.make_buffer = kept
        agent = TransferAgent((arena.region,))
        self.agents.append(agent)
        return NixlOutbound(agent, DRAM)

    async def landing(self, slab: Slab) -> LocalLanding:
        landing = LocalLanding(slab.region, bank=0)
        await landing.open()
        return landing

    def close(self) -> None:
        for agent in self.agents:
            agent.close()


class Sides:
    """How rows travel in tests that do not say: set by a fixture."""

    nixl: Nixl | None = None


class ZeroBuffer(PatternBuffer):
    """Many rows, cheaply."""

    def __init__(self, digest: bytes, rows: Span) -> None:
        self.num_rows = len(rows)
        self._row = ROW
        self._data = bytes(len(rows) * ROW)


class PatternEngine:
    """Implements `encoder_svc.messages.Engine` without a tower."""

    def __init__(self, *, segment_rows: int = 20, delay_s: float = 0.0) -> None:
        self.segment_rows = segment_rows
        self.delay_s = delay_s
        self.fail: Cause | None = None
        self.extra_rows = 0
        self.make_buffer: Callable[[bytes, Span], RowBuffer] = PatternBuffer
        self.submitted: list[EncodeJob] = []
        self.cancelled: list[bytes] = []
        self._sink: Sink | None = None
        self._jobs: dict[bytes, asyncio.Task[None]] = {}

    def start(self, sink: Sink) -> None:
        self._sink = sink

    @property
    def pending_patches(self) -> int:
        return sum(not task.done() for task in self._jobs.values())

    def check(self, plan: MediaPlan, frames: Span | None, rows: Span) -> int:
        if plan.family != "f":
            raise InvalidRequest("another family")
        return 1

    def segments(self, plan: MediaPlan, frames: Span | None, rows: Span) -> tuple[Span, ...]:
        if len(rows) > MOST_ROWS or self.extra_rows:
            return ()
        return segments_of([len(rows)], first=rows.begin, most=self.segment_rows)

    def submit(self, job: EncodeJob) -> None:
        self.submitted.append(job)
        self._jobs[job.key] = asyncio.create_task(self._run(job))

    def cancel(self, key: bytes) -> None:
        self.cancelled.append(key)
        self._jobs.pop(key).cancel()

    async def _run(self, job: EncodeJob) -> None:
        assert self._sink is not None
        await asyncio.sleep(self.delay_s)
        if self.fail is not None:
            self._sink.failed(job.key, self.fail, "made to fail")
            return
        end = job.rows.end + self.extra_rows
        for segment, begin in enumerate(range(job.rows.begin, end, self.segment_rows)):
            rows = Span(begin, min(begin + self.segment_rows, end))
            buffer = self.make_buffer(job.plan.digest, rows)
            self._sink.segment_ready(job.key, segment, rows, buffer)
            await asyncio.sleep(0)
        self._sink.finished(job.key, EncodeStats(1.0, 2.0, 3.0))


def media_plan(name: str, num_rows: int = 50, *, media: bytes = b"media") -> MediaPlan:
    digest = name.encode().ljust(32, b".")
    return MediaPlan(digest, "f", Modality.IMAGE, 1, 1, 1, 1, (), num_rows, len(media), "image/png")


def bytes_of(plan: MediaPlan) -> bytes:
    """Every row of a medium."""
    return pattern_rows(plan.digest, Span(0, plan.num_rows), ROW)


@dataclass
class Encoder:
    """One served encoder."""

    engine: PatternEngine
    servicer: EncoderServicer
    server: Server
    epoch: int

    @property
    def stub(self) -> encoder_pb2_grpc.EncoderStub:
        return encoder_pb2_grpc.EncoderStub(self.channel)

    channel: grpc.aio.Channel = field(default=None)  # type: ignore[assignment]

    def source(self, encode_id: bytes) -> Source:
        return Source(encode_id, self.server.address, self.epoch)

    async def encode(
        self, plan: MediaPlan, *, media: bytes = b"media", encode_id: bytes | None = None
    ) -> tuple[bytes, grpc.aio.StreamStreamCall]:
        """Starts an Encode as a gateway does; the call is the interest."""
        encode_id = encode_id or secrets.token_bytes(16)
        call = self.stub.Encode()
        start = encoder_pb2.EncodeStart(encode_id=encode_id, plan=plan.to_proto())
        await call.write(encoder_pb2.EncodeRequest(start=start))
        async for first in messages(call):
            if first.accepted.media_needed:
                await call.write(encoder_pb2.EncodeRequest(chunk=media))
            break
        return encode_id, call


@asynccontextmanager
async def encoder(
    engine: PatternEngine | None = None,
    *,
    port: int = 0,
    outbound: Outbound | None = None,
    **limits: object,
) -> AsyncIterator[Encoder]:
    engine = engine or PatternEngine()
    if outbound is None and Sides.nixl is not None:
        outbound = Sides.nixl.outbound(engine)
    epoch = secrets.randbits(60) | 1
    settings: dict[str, object] = {"fetch_grace_s": 600.0, **limits}
    servicer = EncoderServicer(
        engine,
        config=EncoderConfig(model="demo", **settings),  # type: ignore[arg-type]
        description=common_pb2.Description(epoch=epoch, rows=FORMAT.to_proto(), role="encoder"),
        metrics=EncoderMetrics(),
        outbound=outbound,
    )
    engine.start(servicer.store)
    async with serving(servicer, port=port) as server, connect(server.address) as channel:
        yield Encoder(engine, servicer, server, epoch, channel)


class Decoder:
    """Receiver, fetcher and slab, driven by hand as an engine would."""

    def __init__(
        self,
        *,
        pages: int = 16,
        row_format: RowFormat = FORMAT,
        open_receiver: Callable[[Slab], OpenReceiver] | None = None,
    ) -> None:
        self.slab = Slab(pages * PAGE_ROWS * ROW)
        self.receiver = EmbeddingReceiver(
            pages=pages,
            page_rows=PAGE_ROWS,
            row_bytes=ROW,
            reserve_rows=PAGE_ROWS,
            row_format=row_format,
        )
        self.events: list[FetchEvent] = []
        self.free_pages: list[int] = []  # after each of them
        self.dropped: list[int] = []
        self.notices: list[Notice] = []
        self.news = asyncio.Event()
        self.landing: LocalLanding | None = None
        self.inline_bytes = 0
        make = open_receiver or (lambda slab: self._receiver)
        self.fetcher = Fetcher(
            row_format=row_format,
            open_receiver=make(self.slab),
            post=self._post,
            on_dropped=self.dropped.append,
            gone_s=0.3,
        )
        self.demands: list[Demand] = []

    def _receiver(self, fetch_id: bytes) -> Receiver:
        stream = StreamReceiver(self.slab.write)
        if self.landing is None:
            return stream
        return NixlReceiver(fetch_id, (self.landing,), stream, inline_bytes=self.inline_bytes)

    def _post(self, event: FetchEvent) -> None:
        self.events.append(event)
        self.receiver.on_event(event)
        self.step()
        self.free_pages.append(self.receiver.num_free_pages)

    def step(self) -> None:
        self.receiver.grant(self.demands)
        self.receiver.check()
        self.notices += self.receiver.take_notices()
        self.fetcher.execute(self.receiver.take_commands())
        self.news.set()

    def want(
        self, request_id: str, plan: MediaPlan, sources: Sequence[Source], **kwargs: int
    ) -> None:
        """One item, cut evenly into as many parts as there are sources."""
        size = -(-plan.num_rows // len(sources))
        parts = tuple(
            Part(i, Span(i * size, min((i + 1) * size, plan.num_rows)), source)
            for i, source in enumerate(sources)
        )
        self.receiver.add(request_id, [Promise(0, plan, 0, parts)])
        self.demands.append(Demand(request_id, 0, Span(0, kwargs.get("until", plan.num_rows))))
        self.step()

    def drop(self, request_id: str) -> None:
        self.receiver.release(request_id)
        self.demands = [d for d in self.demands if d.request_id != request_id]
        self.step()

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not done():
                self.news.clear()
                with_timeout = asyncio.wait_for(self.news.wait(), 0.05)
                try:
                    await with_timeout
                except TimeoutError:
                    continue

    async def rows(self, request_id: str, num_rows: int) -> bytes:
        """Waits for every row of item 0 and returns their bytes."""
        await self.until(lambda: self.receiver.landed_until(request_id, 0, 0) == num_rows)
        return b"".join(
            bytes(self.slab.view()[r.first_slab_row * ROW : (r.first_slab_row + r.num_rows) * ROW])
            for r in self.receiver.locate(request_id, 0, Span(0, num_rows))
        )

    async def idle(self) -> None:
        """Waits until every fetch has ended and every page is free."""
        await self.until(
            lambda: (
                not self.fetcher.num_open
                and self.receiver.num_free_pages * PAGE_ROWS * ROW == self.slab.size
            )
        )

    async def close(self) -> None:
        await self.fetcher.close()
        if self.landing is not None:
            await self.landing.close()
        self.slab.close()


@asynccontextmanager
async def decoder(**kwargs: object) -> AsyncIterator[Decoder]:
    it = Decoder(**kwargs)  # type: ignore[arg-type]
    if Sides.nixl is not None and "open_receiver" not in kwargs:
        it.landing = await Sides.nixl.landing(it.slab)
    try:
        yield it
    finally:
        await it.close()
