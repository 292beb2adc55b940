"""Workers as real processes behind one port: listed, killed, back again, and gone with it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chiasm.config import EncoderConfig
from chiasm.errors import Unavailable
from chiasm.process import Spec
from chiasm.v1 import common_pb2
from encoder_svc import replicas
from encoder_svc.roster import Roster
from tests.unit.encoder.client import EncoderClient
from tests.waiting import DEADLINE_S, until

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 200.0  # two workers start on whatever this machine has left


def children(pid: int) -> set[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except FileNotFoundError:
        return set()
    return {int(word) for word in text.split()}


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.fixture
async def process() -> AsyncIterator[asyncio.subprocess.Process]:
    """`--dp-size 2` on the demo checkpoint, not yet ready."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "encoder_svc", "--model", "demo", "--num-threads", "1"),
        *("--dp-size", "2", "--drain-s", "50"),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        process._transport.close()  # type: ignore[attr-defined]


async def health(client: EncoderClient) -> health_pb2.HealthCheckResponse.ServingStatus:
    stub = health_pb2_grpc.HealthStub(client.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service="chiasm.v1.Encoder"))).status


async def test_a_killed_worker_comes_back(process: asyncio.subprocess.Process) -> None:
    """And the list is right meanwhile; SIGTERM then leaves no process."""
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)
    client = EncoderClient(line.decode().split("address=")[1].strip())
    workers = children(process.pid)
    assert len(workers) == 2
    async with client.channel:
        before = await client.describe()
        assert len({(w.instance_id, w.epoch, w.address) for w in before.workers}) == 2
        assert before.advertised_address not in {w.address for w in before.workers}
        assert before.rows.hidden_size == 128 and len(before.digests.tower) == 32
        assert await health(client) == health_pb2.HealthCheckResponse.SERVING
        for listed in before.workers:
            own = EncoderClient(listed.address)
            async with own.channel:
                assert list((await own.describe()).workers) == [listed]
        watch = client.stub.WatchLoad(common_pb2.WatchLoadRequest(interval_ms=100))
        # Each worker is heard of soon after it is listed.
        while (await watch.read()).embedding_bytes_total < 2 * (1 << 30):
            pass

        victim = min(workers)
        os.kill(victim, signal.SIGKILL)
        while await watch.read() is not grpc.aio.EOF:
            pass
        (left,) = (await client.describe()).workers
        assert left in before.workers
        assert await health(client) == health_pb2.HealthCheckResponse.SERVING
        async with asyncio.timeout(PATIENCE_S):
            while len((after := await client.describe()).workers) < 2:
                assert list(after.workers) == [left]
                await asyncio.sleep(0.1)
        assert {w.address for w in after.workers} == {w.address for w in before.workers}
        (lost,) = (w for w in before.workers if w != left)
        (new,) = (w for w in after.workers if w != left)
        assert new.epoch > lost.epoch and new.instance_id != lost.instance_id
        assert after.epoch == before.epoch

    workers |= children(process.pid)
    process.terminate()
    assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0
    assert not any(map(alive, workers))


async def test_workers_do_not_outlive_a_killed_parent(process: asyncio.subprocess.Process) -> None:
    await until(lambda: len(children(process.pid)) == 2, PATIENCE_S)
    workers = children(process.pid)
    process.kill()
    await process.wait()
    await until(lambda: not any(map(alive, workers)))


async def test_a_worker_that_does_not_start_ends_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reason is its last line."""
    codes = ["import time; time.sleep(600)", "import sys; print('no such model'); sys.exit(3)"]
    monkeypatch.setattr(
        replicas,
        "worker_spec",
        lambda config, index: Spec(f"worker-{index}", (sys.executable, "-c", codes[index])),
    )
    several = replicas.Replicas(
        EncoderConfig(model="m", dp_size=2), Roster(common_pb2.Description())
    )
    with pytest.raises(Unavailable, match=r"worker-1 did not start \(exit code 3\): no such model"):
        await several.start()
    pids = several._supervisor.pids().values()
    await several.stop()
    assert len(pids) >= 1 and not any(map(alive, pids))
