"""Encoder servicer <-> fetcher over a real port: rows, cancels, deaths, disagreements."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from chiasm.channel import messages
from chiasm.plan import Cause, Span
from chiasm.v1 import encoder_pb2
from decoder_svc.embeddings.events import ItemLanded, PartLost, Quiesced
from tests.unit.transfer.loopback import (
    FORMAT,
    ROW,
    PatternEngine,
    ZeroBuffer,
    bytes_of,
    decoder,
    encoder,
    media_plan,
)
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("either")


async def test_rows_arrive_bit_equal_and_everything_comes_back() -> None:
    async with encoder() as e, decoder() as d:
        plan = media_plan("a")
        encode_id, call = await e.encode(plan)
        d.want("r", plan, [e.source(encode_id)])
        assert await d.rows("r", 50) == bytes_of(plan)
        assert d.notices == [ItemLanded("r", 0)]
        d.drop("r")
        await d.idle()
        assert d.receiver.counters.stale_events == 0
        assert e.servicer.store.num_encodes == 1
        kinds = []
        await call.done_writing()
        async for response in messages(call):
            kinds.append(response.WhichOneof("kind"))
        assert kinds == ["ready", "ready", "ready", "done"]
        await until(lambda: not e.servicer.store.num_encodes)
        assert e.servicer.fetches.num_open == 0
        assert e.servicer.store.free_bytes == e.servicer.store.cache_bytes
        e.servicer.store.check()
        e.servicer.fetches.check()


async def test_a_fetch_may_come_first_and_its_encode_in_time() -> None:
    async with encoder() as e, decoder() as d:
        plan = media_plan("a")
        d.want("r", plan, [e.source(b"later")])
        await asyncio.sleep(0.05)
        await e.encode(plan, encode_id=b"later")
        assert await d.rows("r", 50) == bytes_of(plan)


async def test_an_unknown_encode_id_is_lost_after_the_grace() -> None:
    async with encoder(fetch_grace_s=0.3) as e, decoder() as d:
        d.want("r", media_plan("a"), [e.source(b"never")])
        await d.until(lambda: bool(d.notices))
        (lost,) = d.notices
        assert isinstance(lost, PartLost) and lost.cause is Cause.LOST
        await d.idle()


@pytest.mark.parametrize("what", ["epoch", "ended", "digest", "rows"])
async def test_a_fetch_that_cannot_be_served_fails_at_once(what: str) -> None:
    async with encoder() as e, decoder() as d:
        plan = media_plan("a")
        encode_id, call = await e.encode(plan)
        source = e.source(encode_id)
        match what:
            case "epoch":
                source = replace(source, encoder_epoch=e.epoch + 1)
            case "ended":
                call.cancel()
                await until(lambda: not e.servicer.store.num_encodes)
            case "digest":
                plan = media_plan("b")
            case "rows":
                plan = media_plan("a", 51)
        d.want("r", plan, [source])
        await d.until(lambda: bool(d.notices))
        assert isinstance(d.notices[0], PartLost)
        await d.idle()
        assert any(isinstance(event, Quiesced) for event in d.events)


async def test_two_decoders_share_one_encode_and_parts_come_from_two_encoders() -> None:
    async with encoder() as e1, encoder() as e2, decoder() as d1, decoder() as d2:
        plan = media_plan("a")
        calls = [await e.encode(plan) for e in (e1, e2, e1)]
        id1, id2, id3 = (encode_id for encode_id, _ in calls)
        for d, first in ((d1, id1), (d2, id3)):
            d.want("r", plan, [e1.source(first), e2.source(id2)])
        for d in (d1, d2):
            assert await d.rows("r", 50) == bytes_of(plan)
        assert len(e1.engine.submitted) == 1


async def test_interest_of_a_fetch_outlives_its_encode_stream() -> None:
    async with encoder() as e, decoder() as d:
        plan = media_plan("a")
        encode_id, call = await e.encode(plan)
        d.want("r", plan, [e.source(encode_id)], until=8)
        await d.until(lambda: d.receiver.landed_until("r", 0, 0) == 8)
        call.cancel()
        await until(lambda: not e.servicer.store.num_encodes)
        assert e.servicer.store.free_bytes < e.servicer.store.cache_bytes
        d.demands = [replace(d.demands[0], rows=Span(0, 50))]
        d.step()
        assert await d.rows("r", 50) == bytes_of(plan)
        await until(lambda: e.servicer.store.free_bytes == e.servicer.store.cache_bytes)


async def test_an_abort_never_lets_old_rows_into_new_pages() -> None:
    """Abort A, start B with another picture on the same pages, 500 times."""
    engine = PatternEngine(segment_rows=16)
    async with encoder(engine) as e, decoder(pages=8) as d:
        for index in range(500):
            plan_a, plan_b = media_plan(f"a{index}", 60), media_plan(f"b{index}", 60)
            (id_a, call_a), (id_b, call_b) = await e.encode(plan_a), await e.encode(plan_b)
            d.want("a", plan_a, [e.source(id_a)])
            for _ in range(index % 9):  # abort at different points of the transfer
                await asyncio.sleep(0)
            d.drop("a")
            d.want("b", plan_b, [e.source(id_b)])
            assert await d.rows("b", 60) == bytes_of(plan_b)
            d.drop("b")
            for call in (call_a, call_b):
                call.cancel()
        await d.idle()
        await until(lambda: not e.servicer.store.num_encodes)
        assert e.servicer.fetches.num_open == 0


async def test_hundreds_of_aborts_leave_nothing_behind() -> None:
    """Aborted in encode, in transfer, after transfer; counts return to where they were."""
    engine = PatternEngine(segment_rows=16)
    async with encoder(engine, cache_bytes=500 * ROW) as e, decoder(pages=8) as d:
        for index in range(150):
            plan = media_plan(f"{index % 40}", 60)
            encode_id, call = await e.encode(plan)
            d.want("r", plan, [e.source(encode_id)])
            if index % 3 == 1:
                await d.until(lambda: d.receiver.landed_until("r", 0, 0) > 0)
            elif index % 3 == 2:
                await d.rows("r", 60)
            call.cancel()
            d.drop("r")
        await d.idle()
        await until(lambda: not e.servicer.store.num_encodes)
        await until(lambda: not e.servicer.fetches.num_open)
        e.servicer.store.check()
        e.servicer.fetches.check()
        assert e.servicer.store.free_bytes == e.servicer.store.cache_bytes
        assert engine.pending_patches == 0


async def test_a_slow_reader_makes_a_slow_writer() -> None:
    """Rows are read from the store as the stream takes them, not ahead of it."""
    rows = 1 << 20  # 64 MiB
    engine = PatternEngine(segment_rows=rows)
    engine.make_buffer = ZeroBuffer
    async with encoder(engine) as e:
        plan = media_plan("a", rows)
        encode_id, _call = await e.encode(plan)
        await until(lambda: bool(e.servicer.store.find(encode_id).segments))
        segment = e.servicer.store.find(encode_id).segments[0]
        num_read = 0
        read = segment.buffer.read

        def counted(begin: int, end: int) -> memoryview:
            nonlocal num_read
            num_read += end - begin
            return read(begin, end)

        segment.buffer.read = counted
        call = e.stub.Fetch()
        whole = Span(0, rows).to_proto()
        opening = encoder_pb2.FetchOpen(
            fetch_id=b"f",
            digest=plan.digest,
            rows=whole,
            encode_id=encode_id,
            rows_format=FORMAT.to_proto(),
        )
        await call.write(encoder_pb2.FetchRequest(open=opening))
        place = encoder_pb2.Destination(rows=whole, length=rows * ROW, memory_type="stream")
        grant = encoder_pb2.FetchGrant(segment=0, destinations=[place])
        while not (await call.read()).HasField("ready"):
            pass
        await call.write(encoder_pb2.FetchRequest(grant=grant))
        await until(lambda: num_read)
        await asyncio.sleep(0.5)
        assert 0 < num_read * ROW < 32 << 20
        call.cancel()
        await until(lambda: not e.servicer.fetches.num_open)
