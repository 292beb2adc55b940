"""`--workers 2`: both serve on one address, a dead one is replaced, their metrics are one page."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import httpx
import pytest

from chiasm.v1 import gateway_pb2, gateway_pb2_grpc
from tests.integration.cluster import PATIENCE_S
from tests.integration.stack import Service, Stack
from tests.integration.test_up import gone

BODY = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Who are you?"}],
    "max_tokens": 4,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def shared(stack: Stack) -> Iterator[Service]:
    """A second gateway of two workers over the same services."""
    other = Stack("demo")
    decoder = next(s.address for s in stack.services if s.name == "decoder_svc")
    try:
        yield other.start(
            "gateway", "--workers", "2", "--decoder-urls", decoder, "--drain-s", "5"
        ).wait_ready()
        codes = other.stop()
        assert codes == {"gateway-0": 0}
    finally:
        other.stop()


def workers(parent: Service) -> dict[int, int]:
    """Workers by process id; how many connections each has."""
    pid = parent.process.pid
    children = [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    rest_port = int(parent.address.rpartition(":")[2])
    return {child: _connections(child, rest_port) for child in children}


def _connections(pid: int, port: int) -> int:
    inodes = set()
    with suppress(OSError):  # it may be ending
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                target = os.readlink(entry)
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    established = [x for x in lines if x[3] == "01" and int(x[1].split(":")[1], 16) == port]
    return sum(x[9] in inodes for x in established)


def ended(pid: int) -> bool:
    """Whether its last thread has ended, which closes what it listened on."""
    try:
        return gone(pid) and len(list(Path(f"/proc/{pid}/task").iterdir())) <= 1
    except OSError:
        return True


async def ask_all(address: str, count: int) -> list[httpx.Response]:
    """Each on a connection of its own."""

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=60) as client:
            return await client.post("/v1/chat/completions", json=BODY)

    return await asyncio.gather(*(ask() for _ in range(count)))


async def until_ready(address: str) -> None:
    """Every worker has found the decoder: so many connections in a row say so."""
    async with asyncio.timeout(PATIENCE_S):
        ready = 0
        while ready < 20:
            async with httpx.AsyncClient(base_url=f"http://{address}", timeout=60) as client:
                ready = ready + 1 if (await client.get("/ready")).status_code == 200 else 0


async def metric(address: str, name: str) -> float:
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=60) as client:
        page = (await client.get("/metrics")).text
    found = [line for line in page.splitlines() if line.startswith(name + " ")]
    return float(found[0].split()[-1]) if found else 0.0


async def until_answered(address: str, count: float) -> None:
    """Each worker is asked for its counts, and one that is busy counts as it did before."""
    async with asyncio.timeout(PATIENCE_S):
        while await metric(address, ANSWERED) < count:
            await asyncio.sleep(0.1)


ANSWERED = 'chiasm_requests_total{code="200"}'


@pytest.mark.timeout(600)
async def test_both_serve_and_a_dead_one_is_replaced(shared: Service) -> None:
    await until_ready(shared.address)
    assert len(workers(shared)) == 2
    async with httpx.AsyncClient(base_url=f"http://{shared.address}", timeout=60) as first:
        others = [
            httpx.AsyncClient(base_url=f"http://{shared.address}", timeout=60) for _ in range(30)
        ]
        for client in (first, *others):
            assert (await client.get("/health")).status_code == 200
        assert min(workers(shared).values()) > 0, "one has all the connections"
        for client in others:
            await client.aclose()
    before = await metric(shared.address, ANSWERED)
    assert {answer.status_code for answer in await ask_all(shared.address, 20)} == {200}
    await until_answered(shared.address, before + 20)
    assert await metric(shared.address, ANSWERED) == before + 20

    victim, survivor = workers(shared)
    os.kill(victim, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        while not ended(victim):  # until then the kernel may give it connections
            await asyncio.sleep(0.01)
        while len(now := workers(shared)) < 2 or victim in now:
            assert {answer.status_code for answer in await ask_all(shared.address, 2)} == {200}
            await asyncio.sleep(0.1)
    assert survivor in now
    await until_ready(shared.address)
    assert {answer.status_code for answer in await ask_all(shared.address, 20)} == {200}
    await until_answered(shared.address, before + 40)  # what the dead one counted, too


async def test_the_grpc_face_is_shared_as_well(shared: Service) -> None:
    await until_ready(shared.address)
    for _ in range(6):
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(shared.grpc, options=options) as channel:
            models = await gateway_pb2_grpc.GatewayStub(channel).ListModels(
                gateway_pb2.ListModelsRequest(), timeout=60
            )
            assert [model.id for model in models.models] == ["demo"]
