"""The fleet: described, verified, watched; gone and back again."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from chiasm.config import GatewayConfig
from chiasm.fakes import FakeDecoder, FakeEncoder
from chiasm.fakes.serving import serving
from chiasm.rows import RowFormat
from chiasm.v1 import common_pb2
from gateway.discovery import DnsDiscovery, Fleet, StaticDiscovery, discovery_for
from gateway.messages import JobDone
from tests.integration.cluster import free_port
from tests.unit.gateway_core.conftest import EXPECTED, RigMaker, chat, collect, picture, png
from tests.waiting import until


async def test_an_encoder_that_returns_is_used_again_with_its_new_epoch(
    make_rig: RigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for where in ("gateway.patience", "gateway.lease"):
        monkeypatch.setattr(f"{where}.PATIENCE_S", 60.0)  # its next try may be a while away
    rig = await make_rig()
    server = rig.servers[id(rig.encoders[0])]
    old = rig.fleet.encoders.endpoints[0]
    await server.stop()
    await until(lambda: not rig.fleet.encoders.endpoints)
    assert not rig.pipeline.readiness().images
    assert rig.pipeline.readiness().text
    replacement = FakeEncoder()
    replacement.description = rig.encoders[0].description
    rig.encoders.append(replacement)
    async with serving(replacement, port=server.port):
        events = await collect(rig.pipeline, chat(picture(png())))  # waits for it
        assert isinstance(events[-1], JobDone)
        assert rig.fleet.encoders.endpoints[0].epoch == replacement.epoch != old.epoch
        assert rig.pipeline.readiness().images


@pytest.mark.parametrize("field", ["processor", "tokenizer", "family"])
async def test_peers_that_do_not_fit_are_not_used(make_rig: RigMaker, field: str) -> None:
    rig = await make_rig()
    good = rig.encoders[0].description if field == "processor" else rig.decoders[0].description
    bad = common_pb2.Description()
    bad.CopyFrom(good)
    peer: FakeEncoder | FakeDecoder = FakeDecoder()
    if field == "processor":
        peer = FakeEncoder()
    if field in ("processor", "tokenizer"):
        setattr(bad.digests, field, b"other")
    elif field == "family":
        bad.family = "other"
    peer.description = bad
    async with serving(peer) as server:
        encoder = field == "processor"
        fleet = Fleet(
            StaticDiscovery(
                encoders=(server.address,) if encoder else (),
                decoders=() if encoder else (server.address,),
            ),
            EXPECTED,
        )
        fleet.start()
        try:
            await until(lambda: "is needed" in str(fleet.readiness().endpoints))
            assert not fleet.encoders.endpoints
            assert not fleet.decoders.endpoints
        finally:
            await fleet.close()


async def test_an_encoder_of_other_rows_is_not_ready_for_images(make_rig: RigMaker) -> None:
    rig = await make_rig(encoders=[FakeEncoder(row_format=RowFormat(16, 1, "float32"))])
    assert not rig.pipeline.readiness().images
    assert rig.pipeline.readiness().text


async def test_workers_behind_a_base_port_are_called_directly(make_rig: RigMaker) -> None:
    rig = await make_rig(encoders=2)
    base = FakeEncoder()
    base.description.CopyFrom(rig.encoders[0].description)
    for encoder in rig.encoders:
        address = rig.servers[id(encoder)].address
        base.description.workers.append(common_pb2.Worker(address=address, epoch=encoder.epoch))
    async with serving(base) as server:
        fleet = Fleet(StaticDiscovery(encoders=(server.address,), decoders=()), EXPECTED)
        fleet.start()
        try:
            await until(lambda: len(fleet.encoders.endpoints) == 2)
            assert server.address not in {e.address for e in fleet.encoders.endpoints}
        finally:
            await fleet.close()


async def test_a_base_port_whose_workers_change_is_described_again(make_rig: RigMaker) -> None:
    rig = await make_rig(encoders=2)
    addresses = [rig.servers[id(encoder)].address for encoder in rig.encoders]
    base = RosterEncoder()
    base.description.CopyFrom(rig.encoders[0].description)
    base.description.workers.append(common_pb2.Worker(address=addresses[0]))
    async with serving(base) as server:
        fleet = Fleet(StaticDiscovery(encoders=(server.address,), decoders=()), EXPECTED)
        fleet.start()
        try:
            await until(lambda: [e.address for e in fleet.encoders.endpoints] == addresses[:1])
            base.description.workers[0].address = addresses[1]
            base.changed.set()
            await until(lambda: [e.address for e in fleet.encoders.endpoints] == addresses[1:])
        finally:
            await fleet.close()


class RosterEncoder(FakeEncoder):
    """Ends its load stream when its workers have changed."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = asyncio.Event()

    async def WatchLoad(self, request, context):  # noqa: ANN001, ANN201, N802
        yield self.load
        await self.changed.wait()


async def test_load_reaches_the_router(make_rig: RigMaker) -> None:
    rig = await make_rig()
    rig.encoders[0].load.draining = True
    await until(lambda: rig.fleet.encoders.pick(b"x", 1) is None)
    rig.encoders[0].load.draining = False
    await until(lambda: rig.fleet.encoders.pick(b"x", 1))


@pytest.mark.usefixtures("hour_between_dials")
async def test_unreachable_peers_are_tried_for_ever() -> None:
    """At the gateway's own pace: a channel that has failed to connect tries no more here."""
    encoder = FakeEncoder()
    port = free_port()
    fleet = Fleet(StaticDiscovery(encoders=(f"127.0.0.1:{port}",), decoders=()), EXPECTED)
    fleet.start()
    try:
        await until(lambda: "refused" in str(fleet.readiness().endpoints))
        await asyncio.sleep(0.3)
        assert not fleet.encoders.endpoints
        encoder.description.family = EXPECTED.family
        encoder.description.digests.processor = EXPECTED.processor
        async with serving(encoder, port=port):
            await until(lambda: fleet.encoders.endpoints)
    finally:
        await fleet.close()


def test_settings() -> None:
    config = GatewayConfig(model="demo", decoder_urls=("127.0.0.1:1",))
    assert isinstance(discovery_for(config), StaticDiscovery)
    assert isinstance(discovery_for(dataclasses.replace(config, discovery="dns")), DnsDiscovery)
    for changes in (
        {"discovery": "dns", "decoder_urls": ()},
        {"discovery": "dns", "encoder_urls": ("nameonly",)},
        {"discovery": "kubernetes"},
        {"decoder_urls": ()},
        {"decoder_urls": ("nowhere",)},
        {"encoder_urls": ("http://x:1",)},
    ):
        fields = {"model": "demo", "decoder_urls": ("127.0.0.1:1",), **changes}
        with pytest.raises(ValueError, match=r"discovery|decoder-urls|address"):
            discovery_for(GatewayConfig(**fields))
