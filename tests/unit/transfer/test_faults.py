"""Deaths, disagreements and wrong grants over a real port: each costs its own part at most."""

from __future__ import annotations

from dataclasses import replace

import grpc
import pytest

from chiasm.channel import messages
from chiasm.fakes import EncoderFaults, FakeEncoder, serving
from chiasm.plan import Cause, Source, Span
from chiasm.rows import RowFormat
from chiasm.v1 import encoder_pb2
from decoder_svc.embeddings.events import Broken, PartLost
from tests.unit.transfer.loopback import (
    FORMAT,
    ROW,
    PatternEngine,
    bytes_of,
    decoder,
    encoder,
    media_plan,
)
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("either")


async def test_an_encoder_that_dies_in_mid_transfer_is_replaced() -> None:
    async with decoder() as d:
        plan = media_plan("a")
        async with encoder() as e1:
            encode_id, _ = await e1.encode(plan)
            d.want("r", plan, [e1.source(encode_id)], until=24)
            await d.until(lambda: d.receiver.landed_until("r", 0, 0) == 24)
        await d.until(lambda: bool(d.notices))
        assert isinstance(d.notices[0], PartLost)
        async with encoder() as e2:
            encode_id, _ = await e2.encode(plan)
            d.receiver.redirect("r", 0, 0, 2, e2.source(encode_id))
            d.demands = [replace(d.demands[0], rows=Span(0, 50))]
            d.step()
            assert await d.rows("r", 50) == bytes_of(plan)
            d.drop("r")
            await d.idle()


async def test_a_dead_endpoint_is_lost_quickly() -> None:
    async with decoder() as d:
        d.want("r", media_plan("a"), [Source(b"x", "127.0.0.1:1", 1)])
        await d.until(lambda: bool(d.notices))
        await d.idle()
        assert [type(e) for e in d.events] == [Broken]


async def test_the_clients_own_fault_is_told_as_such() -> None:
    engine = PatternEngine()
    engine.fail = Cause.INVALID_MEDIA
    async with encoder(engine) as e, decoder() as d:
        plan = media_plan("a")
        d.want("r", plan, [e.source(b"e")])
        _, call = await e.encode(plan, encode_id=b"e")
        got = [m async for m in messages(call)]
        assert Cause.from_proto(got[-1].error.cause) is Cause.INVALID_MEDIA
        await d.until(lambda: bool(d.notices))
        assert isinstance(d.notices[0], PartLost)
        assert d.notices[0].cause is Cause.INVALID_MEDIA
        assert e.servicer.store.used_bytes == 0


@pytest.mark.parametrize("extra", [-1, 1])
async def test_a_tower_that_makes_wrong_counts_fails_its_item_only(extra: int) -> None:
    engine = PatternEngine(segment_rows=100)
    engine.extra_rows = extra
    async with encoder(engine) as e, decoder() as d:
        plan = media_plan("a")
        encode_id, call = await e.encode(plan)
        d.want("r", plan, [e.source(encode_id)])
        await d.until(lambda: bool(d.notices))
        assert isinstance(d.notices[0], PartLost)
        engine.extra_rows = 0
        good = media_plan("b")
        encode_id, _ = await e.encode(good)
        d.want("s", good, [e.source(encode_id)])
        assert await d.rows("s", 50) == bytes_of(good)
        assert call.done() or [m async for m in messages(call)]


@pytest.mark.parametrize(
    "faults",
    [
        EncoderFaults(extra_rows=1),
        EncoderFaults(extra_rows=-1),
        EncoderFaults(hidden_size=17),
        EncoderFaults(break_after_chunks=2),
        EncoderFaults(fail=Cause.EVICTED),
    ],
    ids=lambda f: str(f)[:60],
)
async def test_an_encoder_that_breaks_the_contract_costs_its_part_only(faults) -> None:
    """Wrong counts, wrong widths, a stream that dies; the decoder stays whole."""
    fake = FakeEncoder(row_format=FORMAT, segment_rows=20, faults=faults)
    async with serving(fake) as server, encoder() as e, decoder() as d:
        plan = media_plan("a")
        channel = grpc.aio.insecure_channel(server.address)
        call = channel.stream_stream(
            "/chiasm.v1.Encoder/Encode",
            request_serializer=encoder_pb2.EncodeRequest.SerializeToString,
            response_deserializer=encoder_pb2.EncodeResponse.FromString,
        )()
        start = encoder_pb2.EncodeStart(encode_id=b"f", plan=plan.to_proto())
        await call.write(encoder_pb2.EncodeRequest(start=start))
        await call.write(encoder_pb2.EncodeRequest(chunk=b"media"))
        d.want("r", plan, [Source(b"f", server.address, fake.epoch)])
        await d.until(lambda: bool(d.notices))
        assert isinstance(d.notices[0], PartLost)
        encode_id, _ = await e.encode(plan)
        d.receiver.redirect("r", 0, 0, 2, e.source(encode_id))
        d.step()
        assert await d.rows("r", 50) == bytes_of(plan)
        d.drop("r")
        await d.idle()
        await channel.close()


async def test_decoders_built_for_other_rows_are_refused_before_any_row() -> None:
    async with encoder() as e, decoder(row_format=RowFormat(16, 1, "bfloat16")) as d:
        plan = media_plan("a")
        encode_id, _ = await e.encode(plan)
        d.want("r", plan, [e.source(encode_id)])
        await d.until(lambda: bool(d.notices))
        assert isinstance(d.notices[0], PartLost)
        assert "bfloat16" in d.notices[0].message


async def start_fetch(e, encode_id: bytes, digest: bytes, fetch_id: bytes = b"f"):
    call = e.stub.Fetch()
    opening = encoder_pb2.FetchOpen(
        fetch_id=fetch_id,
        digest=digest,
        rows=Span(0, 50).to_proto(),
        encode_id=encode_id,
        encoder_epoch=e.epoch,
        rows_format=FORMAT.to_proto(),
    )
    await call.write(encoder_pb2.FetchRequest(open=opening))
    return call


@pytest.mark.parametrize(
    "place",
    [
        {"rows": Span(0, 8), "length": 8 * ROW - 1},
        {"rows": Span(0, 21), "length": 21 * ROW},
        {"rows": Span(0, 0), "length": 0},
        {"rows": Span(0, 8), "length": 8 * ROW, "memory_type": "VRAM"},
        None,
    ],
)
async def test_a_hostile_grant_ends_that_fetch_only(place) -> None:
    async with encoder() as e:
        plan = media_plan("a")
        encode_id, _ = await e.encode(plan)
        other = await start_fetch(e, encode_id, plan.digest, b"other")
        call = await start_fetch(e, encode_id, plan.digest)
        places = []
        if place is not None:
            kind = place.get("memory_type", "stream")
            places = [
                encoder_pb2.Destination(
                    rows=place["rows"].to_proto(), length=place["length"], memory_type=kind
                )
            ]
        kinds = []
        async for response in messages(call):
            kinds.append(response.WhichOneof("kind"))
            if response.HasField("ready") and response.ready.segment == 0:
                grant = encoder_pb2.FetchGrant(segment=0, destinations=places)
                await call.write(encoder_pb2.FetchRequest(grant=grant))
        assert kinds[-2:] == ["error", "quiesced"]
        await until(lambda: e.servicer.fetches.num_open == 1)
        await other.write(encoder_pb2.FetchRequest(cancel=encoder_pb2.FetchCancel()))
        assert [m async for m in messages(other)][-1].HasField("quiesced")


async def test_a_fence_stops_a_fetch_and_refuses_a_late_open() -> None:
    async with encoder() as e:
        plan = media_plan("a")
        encode_id, _ = await e.encode(plan)
        call = await start_fetch(e, encode_id, plan.digest)
        await call.read()
        for fetch_id in (b"f", b"late"):
            request = encoder_pb2.FenceRequest(fetch_id=fetch_id, encoder_epoch=e.epoch)
            answer = await e.stub.Fence(request)
            assert answer.encoder_epoch == e.epoch
        assert e.servicer.fetches.num_open == 0
        assert [m async for m in messages(call)][-1].HasField("quiesced")
        late = await start_fetch(e, encode_id, plan.digest, b"late")
        assert [m.WhichOneof("kind") async for m in messages(late)] == ["error", "quiesced"]
        other_life = encoder_pb2.FenceRequest(fetch_id=b"x", encoder_epoch=e.epoch + 1)
        assert (await e.stub.Fence(other_life)).encoder_epoch == e.epoch


async def test_a_decoder_that_dies_leaves_no_interest() -> None:
    async with encoder() as e:
        async with decoder() as d:
            plan = media_plan("a")
            encode_id, call = await e.encode(plan)
            d.want("r", plan, [e.source(encode_id)], until=8)
            await d.until(lambda: d.receiver.landed_until("r", 0, 0) == 8)
            assert e.servicer.fetches.num_open == 1
        await until(lambda: not e.servicer.fetches.num_open)
        call.cancel()
        await until(lambda: not e.servicer.store.num_encodes)
        assert e.servicer.store.free_bytes == e.servicer.store.cache_bytes
