"""Names of headless services: addresses come, go, and are never believed unasked (E04, E10)."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack

from chiasm.fakes import FakeEncoder
from chiasm.fakes.serving import serving
from chiasm.v1 import common_pb2, encoder_pb2
from gateway.clients import EncodeStream
from gateway.discovery import DnsDiscovery, Fleet
from gateway.discovery.base import Peer, PeerRole
from gateway.discovery.dns import getaddrinfo
from tests.integration.cluster import free_port
from tests.unit.gateway_core.conftest import EXPECTED
from tests.waiting import until


class Zone:
    """A name server."""

    def __init__(self, **hosts: object) -> None:
        self.hosts: dict[str, object] = dict(hosts)
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> frozenset[str]:
        self.asked.append(host)
        answer = self.hosts[host]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, asyncio.Event):
            await answer.wait()
            return frozenset()
        return frozenset(answer)  # type: ignore[call-overload]


def discovery(zone: Zone) -> DnsDiscovery:
    return DnsDiscovery(
        encoders=("encoders:1",), decoders=("decoders:2",), resolve=zone, interval_s=0.02
    )


def encoder() -> FakeEncoder:
    fake = FakeEncoder()
    fake.description.family = EXPECTED.family
    fake.description.digests.processor = EXPECTED.processor
    fake.description.digests.tower = b"tower"
    return fake


async def test_every_change_of_addresses_is_told_once() -> None:
    zone = Zone(encoders={"10.0.0.1:1"}, decoders={"10.0.1.1:2"})
    watching = discovery(zone).watch()
    first = await anext(watching)
    assert first == {Peer(PeerRole.ENCODER, "10.0.0.1:1"), Peer(PeerRole.DECODER, "10.0.1.1:2")}
    zone.hosts["encoders"] = {"10.0.0.1:1", "10.0.0.2:1"}
    assert await anext(watching) - first == {Peer(PeerRole.ENCODER, "10.0.0.2:1")}
    zone.hosts["encoders"] = socket.gaierror(socket.EAI_NONAME, "no pod is ready")
    assert await anext(watching) == {Peer(PeerRole.DECODER, "10.0.1.1:2")}
    await watching.aclose()


async def test_a_name_server_that_fails_changes_nothing() -> None:
    zone = Zone(encoders={"10.0.0.1:1"}, decoders={"10.0.1.1:2"})
    watching = discovery(zone).watch()
    await anext(watching)
    zone.hosts["encoders"] = socket.gaierror(socket.EAI_AGAIN, "try again")
    zone.hosts["decoders"] = OSError("no network")
    change = asyncio.ensure_future(anext(watching))
    await until(lambda: zone.asked.count("encoders") > 4)
    assert not change.done()
    zone.hosts["encoders"] = {"10.0.0.9:1"}
    assert Peer(PeerRole.ENCODER, "10.0.0.9:1") in await change
    await watching.aclose()


async def test_a_lookup_that_hangs_is_asked_once_and_holds_up_no_other() -> None:
    zone = Zone(encoders=asyncio.Event(), decoders={"10.0.1.1:2"})
    watching = discovery(zone).watch()
    assert await anext(watching) == {Peer(PeerRole.DECODER, "10.0.1.1:2")}
    zone.hosts["decoders"] = {"10.0.1.2:2"}
    assert await anext(watching) == {Peer(PeerRole.DECODER, "10.0.1.2:2")}
    assert zone.asked.count("encoders") == 1
    await watching.aclose()


async def test_the_systems_resolver() -> None:
    assert "127.0.0.1:80" in await getaddrinfo("localhost", 80)
    assert await getaddrinfo("::1", 80) == {"[::1]:80"}


async def test_a_replacement_at_a_new_address_is_used_and_the_old_one_dropped() -> None:
    zone = Zone(decoders=set())
    async with AsyncExitStack() as stack:
        old = await stack.enter_async_context(serving(encoder()))
        zone.hosts["encoders"] = {old.address}
        fleet = Fleet(discovery(zone), EXPECTED)
        fleet.start()
        stack.push_async_callback(fleet.close)
        await until(lambda: [e.address for e in fleet.encoders.endpoints] == [old.address])
        new = await stack.enter_async_context(serving(encoder()))
        zone.hosts["encoders"] = {new.address}
        await until(lambda: [e.address for e in fleet.encoders.endpoints] == [new.address])


async def test_calls_of_a_pod_that_left_its_name_end_in_peace() -> None:
    zone = Zone(decoders=set())
    fake = encoder()
    async with AsyncExitStack() as stack:
        old = await stack.enter_async_context(serving(fake))
        zone.hosts["encoders"] = {old.address}
        fleet = Fleet(discovery(zone), EXPECTED)
        fleet.start()
        stack.push_async_callback(fleet.close)
        await until(lambda: fleet.encoders.endpoints)
        stream = fleet.encoder(old.address).encode(timeout_s=60)
        reading = asyncio.ensure_future(_drain(stream))
        await stream.send(_start())
        await until(lambda: fake.open_encodes)
        zone.hosts["encoders"] = set()
        await until(lambda: not fleet.encoders.endpoints)
        await asyncio.sleep(0.1)
        assert fake.open_encodes and not reading.done()
        await stream.send(_chunk())
        await stream.half_close()
        assert "done" in await reading


async def test_a_stranger_at_a_known_address_is_refused() -> None:
    zone = Zone(decoders=set())
    async with AsyncExitStack() as stack:
        async with serving(encoder(), port=free_port()) as server:
            zone.hosts["encoders"] = {server.address}
            fleet = Fleet(discovery(zone), EXPECTED)
            fleet.start()
            stack.push_async_callback(fleet.close)
            await until(lambda: fleet.encoders.endpoints)
        stranger = encoder()
        stranger.description.digests.processor = b"another model's"
        await stack.enter_async_context(serving(stranger, port=server.port))
        await until(lambda: "processor digest" in str(fleet.readiness().endpoints))
        assert not fleet.encoders.endpoints
        assert not stranger.encodes


async def test_a_peer_without_a_life_of_its_own_is_refused() -> None:
    nobody = encoder()
    nobody.epoch = 0
    zone = Zone(decoders=set())
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(nobody))
        zone.hosts["encoders"] = {server.address}
        fleet = Fleet(discovery(zone), EXPECTED)
        fleet.start()
        stack.push_async_callback(fleet.close)
        await until(lambda: "epoch" in str(fleet.readiness().endpoints))
        assert not fleet.encoders.endpoints


def _plan() -> common_pb2.MediaPlan:
    return common_pb2.MediaPlan(
        digest=bytes(32),
        family=EXPECTED.family,
        modality=common_pb2.MODALITY_IMAGE,
        source_height=28,
        source_width=28,
        resized_height=28,
        resized_width=28,
        grids=[common_pb2.Grid(t=1, h=2, w=2)],
        num_rows=1,
        media_bytes=4,
        media_type="image/png",
    )


def _start() -> encoder_pb2.EncodeRequest:
    start = encoder_pb2.EncodeStart(encode_id=b"e" * 16, plan=_plan())
    return encoder_pb2.EncodeRequest(start=start)


def _chunk() -> encoder_pb2.EncodeRequest:
    return encoder_pb2.EncodeRequest(chunk=b"1234")


async def _drain(stream: EncodeStream) -> list[str | None]:
    return [message.WhichOneof("kind") async for message in stream]
