"""The two ends of `bench.transfer`, a process each: an encoder whose rows become ready, a decoder.

Real servicer, store, receiver, mailbox, fetcher and transports, each in the thread it has in a
service; only the tower and the model are missing. Clocks are one: CLOCK_MONOTONIC is the machine's.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from chiasm.channel import connect, messages
from chiasm.config import EncoderConfig
from chiasm.fakes import serving
from chiasm.plan import MediaPlan, Modality, Part, Promise, Source, Span
from chiasm.rows import RowFormat
from chiasm.telemetry import EncoderMetrics
from chiasm.transport.agent import TransferAgent
from chiasm.transport.base import RANK_BANK, VRAM, Region
from chiasm.transport.grpc import StreamReceiver
from chiasm.transport.landing import LocalLanding
from chiasm.transport.nixl import NixlOutbound, NixlReceiver
from chiasm.v1 import common_pb2, encoder_pb2, encoder_pb2_grpc
from decoder_svc.embeddings.events import Demand, ItemLanded
from decoder_svc.embeddings.fetcher import Fetcher
from decoder_svc.embeddings.receiver import EmbeddingReceiver
from decoder_svc.embeddings.slab import Slab
from decoder_svc.engine.mailbox import Mailbox
from encoder_svc.arena import RowArena, TensorRows
from encoder_svc.geometry import segments_of
from encoder_svc.messages import EncodeJob, EncodeStats, Sink
from encoder_svc.servicer import EncoderServicer

FORMAT = RowFormat(3584, 1, "bfloat16")  # Qwen2.5-VL-7B: 7,168 bytes
ROW = FORMAT.row_bytes
PAGE_ROWS, GRANT_PAGES, SEGMENT_ROWS = 64, 64, 4096
LARGEST_ROWS = (512 << 20) // ROW
SLACK_ROWS = 4 * SEGMENT_ROWS
ENCODE_S = 0.03


@dataclass(frozen=True, slots=True)
class Ends:
    """Where the two processes keep rows, and how these travel."""

    transport: str
    source: str
    target: str
    marks: bool = False
    """Whether both note when each step of a fetch began (`bench.transfer_split`)."""


@dataclass(frozen=True, slots=True)
class _Order:
    """To the engine's thread."""

    run: Callable[[], None]


class Marks:
    """When steps began, by name, in order. Any thread adds."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}

    def add(self, step: str) -> None:
        self.times.setdefault(step, []).append(time.perf_counter())

    def before(self, step: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, noted."""

        def noted(*args: Any, **named: Any) -> Any:
            self.add(step)
            return call(*args, **named)

        return noted


class ReadyEngine:
    """Implements `encoder_svc.messages.Engine`: rows of any number, ready `ENCODE_S` later.

    A thread says that they are, as the tower's does; when it did so is told as `queue_ms`.

    Args:
        arena: Where they are made.
    """

    pending_patches = 0

    def __init__(self, arena: RowArena) -> None:
        self._arena = arena
        self._sink: Sink | None = None
        self._rows = pattern()
        self.marks = Marks()
        self._tower = ThreadPoolExecutor(1)
        self._jobs: set[asyncio.Task[None]] = set()

    def start(self, sink: Sink) -> None:
        self._sink = sink

    def check(self, plan: MediaPlan, frames: Span | None, rows: Span) -> int:
        return 1

    def segments(self, plan: MediaPlan, frames: Span | None, rows: Span) -> tuple[Span, ...]:
        return segments_of([len(rows)], first=rows.begin, most=SEGMENT_ROWS)

    def submit(self, job: EncodeJob) -> None:
        task = asyncio.get_running_loop().create_task(self._encode(job))
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)

    async def _encode(self, job: EncodeJob) -> None:
        assert self._sink is not None
        loop = asyncio.get_running_loop()
        segments = segments_of([len(job.rows)], first=job.rows.begin, most=SEGMENT_ROWS)
        buffers = [self._make(len(rows)) for rows in segments]
        await asyncio.sleep(ENCODE_S)
        ready_at = await loop.run_in_executor(self._tower, self._ready)
        self.marks.add("told")
        for segment, (rows, buffer) in enumerate(zip(segments, buffers, strict=True)):
            self._sink.segment_ready(job.key, segment, rows, buffer)
        self._sink.finished(job.key, EncodeStats(ready_at * 1e3, 0.0, 0.0))

    def cancel(self, key: bytes) -> None:
        raise AssertionError("jobs are over at once")

    def _ready(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.marks.add("ready")
        return self.marks.times["ready"][-1]

    def _make(self, num_rows: int) -> TensorRows:
        return self._arena.keep(self._rows[:num_rows])


def pattern() -> torch.Tensor:
    """[SEGMENT_ROWS, ROW] bytes: what every segment begins with."""
    return (torch.arange(SEGMENT_ROWS * ROW) % 251).to(torch.uint8).view(SEGMENT_ROWS, ROW)


def run_encoder(ends: Ends, pipe: Connection) -> None:
    """Serves until the pipe closes; says its address and epoch first."""
    asyncio.run(_encoder(ends, pipe))


async def _encoder(ends: Ends, pipe: Connection) -> None:
    cache_bytes = (LARGEST_ROWS + SLACK_ROWS) * ROW
    arena = RowArena(2 * cache_bytes, torch.device(ends.source))
    engine = ReadyEngine(arena)
    agent = TransferAgent((arena.region,)) if ends.transport == "nixl" else None
    epoch = secrets.randbits(60) | 1
    servicer = EncoderServicer(
        engine,
        config=EncoderConfig(model="demo", cache_bytes=cache_bytes),
        description=common_pb2.Description(epoch=epoch, rows=FORMAT.to_proto(), role="encoder"),
        metrics=EncoderMetrics(),
        outbound=None if agent is None else NixlOutbound(agent, arena.region.memory_type),
    )
    engine.start(servicer.store)
    if ends.marks and agent is not None:
        agent.write = engine.marks.before("asked", agent.write)
        agent._post = engine.marks.before("posted", agent._post)
        agent._agent.transfer = engine.marks.before("begun", agent._agent.transfer)
        agent._drop = engine.marks.before("written", agent._drop)
    async with serving(servicer) as server:
        pipe.send((server.address, epoch))
        await asyncio.to_thread(_until_closed, pipe)
    if agent is not None:
        agent.close()
    if ends.marks:
        pipe.send(engine.marks.times)


class Decoder:
    """Receiver in a thread of its own, fetcher and slab; wants one item at a time."""

    def __init__(self, ends: Ends, source: tuple[str, int]) -> None:
        # Twice the largest item: rows are granted ahead while half the pages are free.
        pages = 2 * -(-LARGEST_ROWS // PAGE_ROWS) + 2 * GRANT_PAGES
        self._num_rows = pages * PAGE_ROWS
        self.slab = Slab(self._num_rows * ROW)
        self._ends = ends
        self._address, self._epoch = source
        self._device = torch.device(ends.target)
        self._bank: torch.Tensor | None = None
        self._landing: LocalLanding | None = None
        self._receiver = EmbeddingReceiver(
            pages=pages,
            page_rows=PAGE_ROWS,
            row_bytes=ROW,
            grant_pages=GRANT_PAGES,
            row_format=FORMAT,
        )
        self._loop = asyncio.get_running_loop()
        self._mailbox = Mailbox(lambda *_: None)
        self._fetcher = Fetcher(
            row_format=FORMAT, open_receiver=self._open_receiver, post=self._mailbox.put
        )
        self._demands: list[Demand] = []
        self._landed: asyncio.Future[float] | None = None
        self.marks = Marks()
        self._stopped = False
        self._engine = threading.Thread(target=self._run, daemon=True)
        self._engine.start()

    async def open(self) -> None:
        if self._ends.transport != "nixl":
            return
        region = self.slab.region
        if self._device.type == "cuda":
            self._bank = torch.zeros(self.slab.size, dtype=torch.uint8, device=self._device)
            index = self._device.index or 0
            region = Region(self._bank.data_ptr(), self.slab.size, VRAM, index)
        self._landing = LocalLanding(region, bank=RANK_BANK)
        await self._landing.open()
        if self._ends.marks:
            agent, arrivals = self._landing._agent, self._landing.arrivals
            assert agent is not None
            agent._on_notices = self.marks.before("heard", agent._on_notices)
            arrivals.put = self.marks.before("arrived", arrivals.put)

    async def fetch(self, num_rows: int, *, check: bool) -> float:
        """Seconds from rows ready in the encoder until the engine's thread may use them here.

        The fetch is opened while they are being made, as in a request. With `check`, looks at every
        byte.
        """
        digest = secrets.token_bytes(32)
        plan = MediaPlan(digest, "f", Modality.IMAGE, 1, 1, 1, 1, (), num_rows, 1, "image/png")
        async with AsyncExitStack() as stack:
            channel = await stack.enter_async_context(connect(self._address))
            encode_id = secrets.token_bytes(16)
            call = encoder_pb2_grpc.EncoderStub(channel).Encode()
            start = encoder_pb2.EncodeStart(encode_id=encode_id, plan=plan.to_proto())
            await call.write(encoder_pb2.EncodeRequest(start=start))
            ready_at, landed = 0.0, None
            async for response in messages(call):
                if response.HasField("accepted"):
                    source = Source(encode_id, self._address, self._epoch)
                    landed = self._want(plan, source)
                    await call.write(encoder_pb2.EncodeRequest(chunk=b"m"))
                elif response.HasField("done"):
                    ready_at = response.done.queue_ms / 1e3
                    break
            assert landed is not None
            seconds = await landed - ready_at
            if check:
                self._check(Span(0, plan.num_rows))
            self._order(self._forget)
            call.cancel()
            while self._fetcher.num_open:
                await asyncio.sleep(0.001)
        return seconds

    async def close(self) -> None:
        self._order(self._stop)
        self._engine.join()
        await self._fetcher.close()
        if self._landing is not None:
            await self._landing.close()
        self.slab.close()

    def _want(self, plan: MediaPlan, source: Source) -> asyncio.Future[float]:
        whole = Span(0, plan.num_rows)
        self._landed = self._loop.create_future()

        def add() -> None:
            self._receiver.add("r", [Promise(0, plan, 0, (Part(0, whole, source),))])
            self._demands = [Demand("r", 0, whole)]

        self._order(add)
        return self._landed

    def _order(self, run: Callable[[], None]) -> None:
        self._mailbox.put(_Order(run))  # type: ignore[arg-type]

    # In the engine's thread.

    def _run(self) -> None:
        while not self._stopped:
            self._mailbox.wait(1.0)
            for item in self._mailbox.items():
                if isinstance(item, _Order):
                    item.run()
                else:
                    self._receiver.on_event(item)  # type: ignore[arg-type]
            self._receiver.grant(self._demands)
            notices = self._receiver.take_notices()
            if notices:
                assert isinstance(notices[0], ItemLanded), notices
                now = time.perf_counter()
                self.marks.add("usable")
                assert self._landed is not None
                self._loop.call_soon_threadsafe(self._landed.set_result, now)
            commands = self._receiver.take_commands()
            if commands:
                self._loop.call_soon_threadsafe(self._fetcher.execute, commands)

    def _forget(self) -> None:
        self._demands = []
        self._receiver.release("r")

    def _stop(self) -> None:
        self._stopped = True

    def _check(self, rows: Span) -> None:
        host = torch.frombuffer(self.slab.view(), dtype=torch.uint8)
        banks = [host[: len(host) // ROW * ROW].view(-1, ROW)]
        if self._bank is not None:
            banks.append(self._bank[: len(host) // ROW * ROW].view(-1, ROW))
        elif self._landing is not None:
            banks.append(banks[0])
        wanted, at = pattern(), 0
        for run in self._receiver.locate("r", 0, rows):
            bank, first = divmod(run.first_slab_row, self._num_rows)
            landed = banks[bank][first : first + run.num_rows].to("cpu")
            index = torch.arange(at, at + run.num_rows) % SEGMENT_ROWS
            assert torch.equal(landed, wanted[index]), f"rows from {at} on are wrong"
            at += run.num_rows
        assert at == len(rows)

    def _open_receiver(self, fetch_id: bytes) -> StreamReceiver | NixlReceiver:
        stream = StreamReceiver(self.slab.write)
        if self._landing is None:
            return stream
        return NixlReceiver(fetch_id, (self._landing,), stream)


def run_decoder(
    ends: Ends, source: tuple[str, int], work: Sequence[tuple[int, int]], pipe: Connection
) -> None:
    """Fetches so many rows so many times; sends a list of seconds for each pair of `work`."""
    asyncio.run(_decoder(ends, source, work, pipe))


async def _decoder(
    ends: Ends, source: tuple[str, int], work: Sequence[tuple[int, int]], pipe: Connection
) -> None:
    decoder = Decoder(ends, source)
    await decoder.open()
    for num_rows, repeats in work:
        # The first touches memory for the first time.
        timings = [await decoder.fetch(num_rows, check=not i) for i in range(repeats + 1)]
        pipe.send(timings[1:])
    if ends.marks:
        pipe.send(decoder.marks.times)
    await decoder.close()


def _until_closed(pipe: Connection) -> None:
    try:
        pipe.recv()
    except EOFError:
        return
