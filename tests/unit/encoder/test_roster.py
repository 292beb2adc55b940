"""The list of live workers: true at every moment, and those who watch it learn of a change."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest

from chiasm.channel import connect, messages, typed_errors
from chiasm.config import EncoderConfig, ServerConfig
from chiasm.errors import MethodNotAllowed, Unavailable
from chiasm.server import Server
from chiasm.v1 import common_pb2, encoder_pb2, encoder_pb2_grpc
from encoder_svc.replica_servicer import ReplicaServicer
from encoder_svc.replicas import SERVICE_NAME, worker_spec
from encoder_svc.roster import Roster

IDENTITY = common_pb2.Description(instance_id="base", epoch=9, advertised_address="h:1")


def worker(index: int, epoch: int = 1) -> common_pb2.Description:
    name, address = f"w{index}", f"h:{100 + index}"
    return common_pb2.Description(
        role="encoder",
        family="f",
        instance_id=name,
        epoch=epoch,
        advertised_address=address,
        digests=common_pb2.Digests(tower=b"t", processor=b"p"),
        workers=(common_pb2.Worker(instance_id=name, epoch=epoch, address=address),),
    )


def listed(roster: Roster) -> list[tuple[str, int]]:
    return [(w.instance_id, w.epoch) for w in roster.describe().workers]


def test_who_is_listed() -> None:
    roster = Roster(IDENTITY)
    with pytest.raises(Unavailable, match="no worker of this encoder is ready"):
        roster.describe()
    for index in (10, 2, 1):
        roster.join(f"worker-{index}", worker(index))
    assert listed(roster) == [("w1", 1), ("w2", 1), ("w10", 1)]
    answer = roster.describe()
    assert (answer.instance_id, answer.epoch, answer.advertised_address) == ("base", 9, "h:1")
    assert (answer.family, answer.digests.tower, answer.digests.processor) == ("f", b"t", b"p")
    roster.leave("worker-2")
    roster.leave("worker-2")
    roster.join("worker-1", worker(1, epoch=5))
    assert listed(roster) == [("w1", 5), ("w10", 1)]
    assert roster.version == 5  # the second leave changed nothing


def test_loads_add_up_and_go_with_their_worker() -> None:
    roster = Roster(IDENTITY)
    load = common_pb2.Load(running=1, pending_patches=10, embedding_bytes_free=5)
    roster.advise("worker-0", load)  # not live: a late word
    assert roster.load() == common_pb2.Load()
    for index in (0, 1):
        roster.join(f"worker-{index}", worker(index))
        roster.advise(f"worker-{index}", load)
    total = common_pb2.Load(running=2, pending_patches=20, embedding_bytes_free=10)
    assert roster.load() == total
    roster.leave("worker-0")
    assert roster.load() == load
    roster.draining = True
    assert roster.load().draining


@pytest.fixture
async def served() -> AsyncIterator[tuple[Roster, encoder_pb2_grpc.EncoderStub]]:
    roster = Roster(IDENTITY)
    server = Server("127.0.0.1", 0, drain_s=0.1)
    encoder_pb2_grpc.add_EncoderServicer_to_server(ReplicaServicer(roster), server.grpc)
    await server.start((SERVICE_NAME,))
    async with connect(server.address) as channel:
        yield roster, encoder_pb2_grpc.EncoderStub(channel)
    await server.stop()


async def test_a_load_stream_ends_when_the_list_changes(
    served: tuple[Roster, encoder_pb2_grpc.EncoderStub],
) -> None:
    """That is how a gateway learns to Describe again."""
    roster, stub = served
    request = common_pb2.WatchLoadRequest(interval_ms=100)
    with pytest.raises(Unavailable), typed_errors():
        await stub.Describe(common_pb2.DescribeRequest())
    with pytest.raises(Unavailable):
        async for _ in messages(stub.WatchLoad(request)):
            pass
    roster.join("worker-0", worker(0))
    for change in (
        lambda: roster.join("worker-1", worker(1)),
        lambda: roster.join("worker-1", worker(1, epoch=2)),
        lambda: roster.leave("worker-1"),
    ):
        seen = 0
        async with asyncio.timeout(60):
            async for _ in messages(stub.WatchLoad(request)):
                seen += 1
                if seen == 3:
                    change()
        assert seen >= 3


async def test_a_change_between_two_words_is_not_missed() -> None:
    roster = Roster(IDENTITY)
    version = roster.version
    roster.join("worker-0", worker(0))
    assert await roster.changed(version, 60)
    assert not await roster.changed(roster.version, 0.01)


async def test_rows_are_had_elsewhere(
    served: tuple[Roster, encoder_pb2_grpc.EncoderStub],
) -> None:
    _, stub = served
    for call in (stub.Encode(), stub.Fetch()):
        with pytest.raises(Exception, match="only lists the workers") as caught:
            async for _ in messages(call):
                pass
        assert isinstance(caught.value, MethodNotAllowed)
    with pytest.raises(MethodNotAllowed), typed_errors():
        await stub.Fence(encoder_pb2.FenceRequest(fetch_id=b"f"))


@pytest.mark.parametrize(
    ("device", "expected"), [("auto", "auto:1"), ("cuda", "cuda:1"), ("cpu", "cpu")]
)
def test_how_a_worker_is_started(device: str, expected: str) -> None:
    server = ServerConfig(port=7000, metrics_port=9000, host="0.0.0.0")
    config = EncoderConfig(model="m", dp_size=4, device=device, num_threads=3, server=server)
    spec = worker_spec(config, 1)
    said = dict(flag.split("=", 1) for flag in spec.command if "=" in flag)
    assert said["--device"] == expected and said["--dp-size"] == "1"
    assert said["--metrics-port"] == "9001" and said["--host"] == "0.0.0.0"
    assert spec.command[-2:] == ("--port", "0") and spec.pinned == {"address": "--port"}
    assert said["--num-threads"] == "3"


@pytest.mark.parametrize("changes", [{"dp_size": 0}, {"dp_size": 2, "device": "cuda:1"}])
def test_settings_that_cannot_be(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="--dp-size"):
        EncoderConfig(model="m", **changes)  # type: ignore[arg-type]


def test_who_watches_over_workers_imports_no_torch() -> None:
    code = (
        "import sys, encoder_svc.app, encoder_svc.replicas;"
        "sys.exit('torch is there' if 'torch' in sys.modules else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=110)
