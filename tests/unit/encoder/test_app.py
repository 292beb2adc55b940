"""The whole worker as a process, on the demo checkpoint, spoken to over gRPC alone."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from PIL import Image

from chiasm.checkpoint import resolve_model
from chiasm.config import EncoderConfig
from chiasm.digest import processor_digest, tower_digest
from chiasm.plan import MediaPlan, Span
from chiasm.v1 import common_pb2, encoder_pb2
from encoder_svc.geometry import resolve_run
from encoder_svc.processor import Processor
from encoder_svc.worker import load_parts
from tests.unit.encoder.client import EncoderClient
from tests.unit.encoder.plans import image_plan, job
from tests.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[3]
ROW_BYTES = 128 * 4
START_S = 200.0  # a process that imports torch, on whatever this machine has left
pytestmark = pytest.mark.timeout(400)
DEMO = resolve_model("demo")


class Worker(EncoderClient):
    """A running encoder."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        super().__init__(address)
        self.process = process


@pytest.fixture
async def worker() -> AsyncIterator[Worker]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "encoder_svc", "--model", "demo", "--num-threads", "1"),
        *("--segment-rows", "8", "--drain-s", "100"),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), START_S)
        worker = Worker(process, line.decode().split("address=")[1].strip())
        async with worker.channel:
            yield worker
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        process._transport.close()  # type: ignore[attr-defined]


def picture() -> tuple[MediaPlan, bytes]:
    """16 rows: two segments of 8."""
    rng = np.random.default_rng(5)
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (90, 120, 3), dtype=np.uint8)).save(file, "PNG")
    data = file.getvalue()
    plan = image_plan(90, 120, cells=(4, 4))
    return replace(plan, media_bytes=len(data), digest=os.urandom(32)), data


def expected_rows(plan: MediaPlan, data: bytes) -> np.ndarray:
    """The same picture through the same parts, in this process."""
    torch.set_num_threads(1)
    parts = load_parts(EncoderConfig(model="demo"))
    work = job(plan, data)
    units = resolve_run(parts.runner.geometry, plan, None, work.rows).units()
    assert isinstance(parts.processor, Processor)
    prepared = list(parts.processor.prepare(work, units, asyncio.Event()))  # type: ignore[arg-type]
    ((buffer,),) = parts.runner.run(prepared, segment_rows=1 << 20)
    return np.frombuffer(buffer.read(0, plan.num_rows), np.float32).reshape(plan.num_rows, -1)


async def try_encode(worker: Worker, plan: MediaPlan) -> grpc.StatusCode | None:
    """The status an Encode is refused with; None when it is accepted."""
    call = worker.stub.Encode()
    start = encoder_pb2.EncodeStart(encode_id=os.urandom(16), plan=plan.to_proto())
    try:
        await call.write(encoder_pb2.EncodeRequest(start=start))
        await call.read()
    except grpc.aio.AioRpcError as error:
        return error.code()
    call.cancel()
    return None


async def test_a_picture_in_and_rows_out(worker: Worker) -> None:
    description = await worker.stub.Describe(common_pb2.DescribeRequest())
    assert (description.role, description.family) == ("encoder", "qwen2_5_vl")
    assert description.digests.tower == tower_digest(DEMO)
    assert description.digests.processor == processor_digest(DEMO)
    assert description.rows.hidden_size * 4 == ROW_BYTES
    assert [w.address for w in description.workers] == [description.advertised_address]
    plan, data = picture()
    call = await worker.start_encode(plan, data, b"e" * 16)
    fetched = await worker.fetch(plan, b"e" * 16)
    kinds = [(await call.read()).WhichOneof("kind") for _ in range(3)]
    assert kinds == ["ready", "ready", "done"]
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert fetched.segments == [Span(0, 8), Span(8, 16)]
    np.testing.assert_allclose(fetched.values, expected_rows(plan, data), atol=1e-5)


async def test_a_broken_picture_is_an_error_of_the_item(worker: Worker) -> None:
    plan, data = picture()
    broken = data[:-400]
    call = await worker.start_encode(replace(plan, media_bytes=len(broken)), broken, b"b" * 16)
    error = (await call.read()).error
    assert error.cause == common_pb2.CAUSE_INVALID_MEDIA and "corrupt" in error.message
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


async def test_sigterm_drains(worker: Worker) -> None:
    """New Encodes are refused; rows of an open one can still be fetched; then it exits 0."""
    plan, data = picture()
    call = await worker.start_encode(plan, data, b"d" * 16)
    worker.process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(DEADLINE_S):
        while (code := await try_encode(worker, plan)) is None:
            await asyncio.sleep(0.05)
    assert code is grpc.StatusCode.UNAVAILABLE
    assert (await worker.fetch(plan, b"d" * 16)).values.any()
    assert worker.process.returncode is None
    await call.done_writing()
    assert await asyncio.wait_for(worker.process.wait(), DEADLINE_S) == 0
