"""One clip over several encoder workers: its rows are the same to the bit, and come sooner."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from chiasm.plan import MediaPlan, Span
from chiasm.rows import RowFormat
from chiasm.runs import FrameRun, frame_runs
from tests.integration import delays, slow_encoder
from tests.integration.asking import eventually
from tests.integration.media import circle, encode
from tests.integration.stack import Service, Stack
from tests.unit.encoder.client import EncoderClient, Fetched
from tests.unit.encoder.clips import HEIGHT, WIDTH, clip
from tests.unit.encoder.plans import image_plan, video_plan

pytestmark = pytest.mark.timeout(600)

FRAMES = 64
UNIT_S = 1.0  # that a tower takes for each of six
CELLS = (12, 13)  # 624 patches a group, 5 or 6 groups a unit, 6 units


@pytest.fixture(scope="module")
def data() -> bytes:
    """Frames that differ everywhere, some of which are predicted from later ones."""
    rng = np.random.default_rng(7)
    still = [rng.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8) for _ in range(FRAMES)]
    return clip(FRAMES, still=still, b_frames=2)


def fresh_plan(data: bytes) -> MediaPlan:
    """Of another digest each time, so that nothing is served from a store."""
    plan = video_plan(HEIGHT, WIDTH, tuple(range(FRAMES)), cells=CELLS)
    return replace(plan, digest=os.urandom(32), media_bytes=len(data))


@pytest.fixture(scope="module")
def replica() -> Iterator[Stack]:
    """Three workers behind one port."""
    running = Stack("demo")
    try:
        running.start("encoder_svc", "--dp-size", "3", "--num-threads", "1").wait_ready()
        yield running
    finally:
        assert set(running.stop().values()) == {0}


@pytest.fixture
async def workers(replica: Stack) -> AsyncIterator[list[EncoderClient]]:
    async with AsyncExitStack() as stack:
        base = EncoderClient(replica.services[0].address)
        await stack.enter_async_context(base.channel)
        clients = [EncoderClient(worker.address) for worker in (await base.describe()).workers]
        for client in clients:
            await stack.enter_async_context(client.channel)
        yield clients


async def one_run(client: EncoderClient, plan: MediaPlan, data: bytes, run: FrameRun) -> Fetched:
    encode_id = os.urandom(16)
    call = await client.start_encode(plan, data, encode_id, frames=run.frames, rows=run.rows)
    fetched = await client.fetch(plan, encode_id, rows=run.rows)
    kinds = [(await call.read()).WhichOneof("kind") for _ in (*fetched.segments, None)]
    assert kinds == [*["ready"] * len(fetched.segments), "done"]
    await call.done_writing()
    return fetched


async def encode_over(
    workers: list[EncoderClient], plan: MediaPlan, data: bytes, parts: int
) -> list[Fetched]:
    """The clip in so many runs, dealt out to the workers in turn, all at once."""
    runs = frame_runs(plan, parts)
    assert len(runs) == parts
    shares = (
        one_run(workers[index % len(workers)], plan, data, run) for index, run in enumerate(runs)
    )
    return await asyncio.gather(*shares)


def joined(parts: list[Fetched]) -> np.ndarray:
    return np.concatenate([part.values for part in parts])


async def ask_for_pictures(worker: EncoderClient, stop: asyncio.Event) -> int:
    """Keeps a worker busy with other things; returns how many."""
    count = 0
    picture = encode(circle("red"))
    while not stop.is_set():
        plan = image_plan(224, 224, cells=(3 + count % 3, 4))
        plan = replace(plan, digest=os.urandom(32), media_bytes=len(picture))
        encode_id = os.urandom(16)
        call = await worker.start_encode(plan, picture, encode_id)
        await worker.fetch(plan, encode_id)
        await call.done_writing()
        count += 1
    return count


async def test_rows_are_equal_to_the_bit(workers: list[EncoderClient], data: bytes) -> None:
    """One worker; three runs on two; five on three, which are busy with pictures meanwhile."""
    (whole,) = await encode_over(workers[:1], fresh_plan(data), data, 1)
    assert len(whole.segments) == 6 and np.isfinite(whole.values).all()
    assert len(np.unique(whole.values[:, 0])) > len(whole.values) // 2
    parts = await encode_over(workers[:2], fresh_plan(data), data, 3)
    assert np.array_equal(joined(parts), whole.values)
    stop = asyncio.Event()
    busy = [asyncio.create_task(ask_for_pictures(worker, stop)) for worker in workers]
    parts = await encode_over(workers, fresh_plan(data), data, 5)
    stop.set()
    assert min(await asyncio.gather(*busy)) > 0
    assert np.array_equal(joined(parts), whole.values)


async def test_a_part_is_an_entry_of_its_own(workers: list[EncoderClient], data: bytes) -> None:
    """Cached by digest and run; rows of another run are not had under its id."""
    worker = workers[0]
    plan = fresh_plan(data)
    _, run = frame_runs(plan, 6)[:2]
    first = await worker.start_encode(plan, data, b"1" * 16, frames=run.frames, rows=run.rows)
    part = await worker.fetch(plan, b"1" * 16, rows=run.rows)
    assert part.segments == [run.rows]
    second = await worker.start_encode(
        plan, data, b"2" * 16, frames=run.frames, rows=run.rows, cached=True
    )
    some = Span(run.rows.begin + 5, run.rows.end - 7)
    again = await worker.fetch(plan, b"2" * 16, rows=some)
    assert np.array_equal(again.values, part.values[5:-7])
    for rows in (Span(0, 5), Span(run.rows.begin, run.rows.end + 1)):
        with pytest.raises(AssertionError, match="the encode id covers other rows"):
            await worker.fetch(plan, b"1" * 16, rows=rows)
    for call in (first, second):
        await call.done_writing()


async def test_a_whole_clip_is_one_entry_however_it_is_named(
    workers: list[EncoderClient], data: bytes
) -> None:
    short = video_plan(HEIGHT, WIDTH, tuple(range(4)))
    plan = replace(short, digest=os.urandom(32), media_bytes=len(data))
    first = await workers[0].start_encode(plan, data, os.urandom(16))
    second = await workers[0].start_encode(
        plan, data, os.urandom(16), frames=Span(0, 4), rows=Span(0, plan.num_rows), cached=True
    )
    for call in (first, second):
        call.cancel()


@pytest.fixture(scope="module")
def pace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where it says how slow the towers are."""
    path = tmp_path_factory.mktemp("pace") / "delays.json"
    delays.write(path, {})
    return path


@pytest.fixture(scope="module")
def slow(pace: Path) -> Iterator[Stack]:
    """Two workers whose towers are slow, of whatever else this machine is busy with."""
    running = Stack("demo", {delays.VARIABLE: str(pace)})
    try:
        for _ in range(2):
            running.start("tests.integration.slow_encoder")
        for service in running.services:
            service.wait_ready()
        yield running
    finally:
        delays.write(pace, {})
        running.stop()


def patches(service: Service, said: str = "encoded") -> int:
    """How many it has encoded so far, or begun to encode."""
    return sum(int(line.split()[1]) for line in service.lines if line.startswith(f"{said} "))


async def timed(
    workers: list[EncoderClient], data: bytes, parts: int
) -> tuple[float, list[Fetched]]:
    plan = fresh_plan(data)
    began = time.monotonic()
    fetched = await encode_over(workers, plan, data, parts)
    return time.monotonic() - began, fetched


async def test_two_workers_are_nearly_twice_as_fast(slow: Stack, pace: Path, data: bytes) -> None:
    """Each has half of the work, and both are at it at once.

    So the rows come sooner. The cores are shared with everybody, and what else runs only ever adds
    to a time: the least of each counts, measured in turn until it shows.
    """
    row_format = RowFormat(slow_encoder.HIDDEN_SIZE, levels=1, dtype="float32")
    async with AsyncExitStack() as stack:
        clients = [EncoderClient(s.address, row_format=row_format) for s in slow.services]
        for client in clients:
            await stack.enter_async_context(client.channel)
        delays.write(pace, {"all": delays.HOLD})
        running = asyncio.create_task(timed(clients, data, 2))
        await eventually(lambda: all(patches(service, "encoding") for service in slow.services))
        assert not any(map(patches, slow.services)), "both are in the middle of something"
        delays.write(pace, {"all": UNIT_S})
        await running
        shares = [*map(patches, slow.services)]
        assert sum(shares) == FRAMES // 2 * 4 * CELLS[0] * CELLS[1]
        assert sum(shares) / max(shares) >= 1.8, shares
        alone_s = together_s = math.inf
        for _ in range(8):
            took_s, (whole,) = await timed(clients[:1], data, 1)
            alone_s = min(alone_s, took_s)
            took_s, parts = await timed(clients, data, 2)
            together_s = min(together_s, took_s)
            assert np.array_equal(joined(parts), whole.values)
            if alone_s / together_s >= 1.8:
                break
    print(f"{shares} patches; {alone_s:.2f} s on one worker, {together_s:.2f} s on two")
    assert alone_s / together_s >= 1.8
