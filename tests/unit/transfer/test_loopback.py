"""Encoder servicer <-> fetcher over a real port: rows, cancels, deaths, disagreements."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import pytest

from chiasm.channel import messages
from chiasm.errors import ChiasmError, EmbeddingLost, InvalidRequest, ResourceExhausted, TooLarge
from chiasm.fakes import EncoderFaults, FakeEncoder, pattern_rows, serving
from chiasm.plan import Cause, Source, Span
from chiasm.rows import RowFormat
from chiasm.transport.local import DRAM, LocalMemory, LocalReceiver
from chiasm.v1 import common_pb2, encoder_pb2
from decoder_svc.embeddings.events import Broken, Fenced, ItemLanded, PartLost, Quiesced
from tests.unit.transfer.loopback import (
    FORMAT,
    PAGE_ROWS,
    ROW,
    PatternEngine,
    ZeroBuffer,
    decoder,
    encoder,
    eventually,
    media_plan,
)


def bytes_of(plan) -> bytes:
    return pattern_rows(plan.digest, Span(0, plan.num_rows), ROW)


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
        await eventually(lambda: not e.servicer.store.num_encodes)
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
    async with encoder() as e, decoder() as d:
        d.want("r", media_plan("a"), [e.source(b"never")])
        await d.until(lambda: bool(d.notices))
        (lost,) = d.notices
        assert isinstance(lost, PartLost) and lost.cause is Cause.LOST
        await d.idle()


@pytest.mark.parametrize("what", ["epoch", "ended", "digest", "rows"])
async def test_a_fetch_that_cannot_be_served_fails_at_once(what: str) -> None:
    async with encoder(fetch_grace_s=60.0) as e, decoder() as d:
        plan = media_plan("a")
        encode_id, call = await e.encode(plan)
        source = e.source(encode_id)
        match what:
            case "epoch":
                source = replace(source, encoder_epoch=e.epoch + 1)
            case "ended":
                call.cancel()
                await eventually(lambda: not e.servicer.store.num_encodes)
            case "digest":
                plan = media_plan("b")
            case "rows":
                plan = media_plan("a", 51)
        d.want("r", plan, [source])
        await d.until(lambda: bool(d.notices), timeout_s=2)
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


async def test_the_second_encode_of_a_digest_is_cached() -> None:
    async with encoder() as e:
        plan = media_plan("a")
        _, first = await e.encode(plan)
        async for response in messages(first):
            if response.HasField("done"):
                break
        call = e.stub.Encode()
        start = encoder_pb2.EncodeStart(encode_id=b"2", plan=plan.to_proto())
        await call.write(encoder_pb2.EncodeRequest(start=start))
        await call.done_writing()
        got = [m async for m in messages(call)]
        assert got[0].accepted.cached and not got[0].accepted.media_needed
        assert [m.WhichOneof("kind") for m in got[1:]] == ["ready", "ready", "ready", "done"]
        first.cancel()


async def test_an_aborted_encode_cancels_the_job_and_frees_the_space() -> None:
    engine = PatternEngine(delay_s=30)
    async with encoder(engine) as e:
        for index in range(20):
            _, call = await e.encode(media_plan(f"{index}"))
            await eventually(lambda: bool(engine.submitted))
            call.cancel()
        await eventually(lambda: not e.servicer.store.num_encodes)
        assert len(engine.cancelled) == len(engine.submitted)
        assert e.servicer.store.used_bytes == 0
        e.servicer.store.check()


async def test_interest_of_a_fetch_outlives_its_encode_stream() -> None:
    async with encoder() as e, decoder() as d:
        plan = media_plan("a")
        encode_id, call = await e.encode(plan)
        d.want("r", plan, [e.source(encode_id)], until=8)
        await d.until(lambda: d.receiver.landed_until("r", 0, 0) == 8)
        call.cancel()
        await eventually(lambda: not e.servicer.store.num_encodes)
        assert e.servicer.store.free_bytes < e.servicer.store.cache_bytes
        d.demands = [replace(d.demands[0], rows=Span(0, 50))]
        d.step()
        assert await d.rows("r", 50) == bytes_of(plan)
        await eventually(lambda: e.servicer.store.free_bytes == e.servicer.store.cache_bytes)


async def test_an_abort_never_lets_old_rows_into_new_pages() -> None:
    """E02: abort A, start B with another picture on the same pages, 200 times."""
    engine = PatternEngine(segment_rows=16)
    async with encoder(engine) as e, decoder(pages=8) as d:
        for index in range(200):
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
        await eventually(lambda: not e.servicer.store.num_encodes)
        assert e.servicer.fetches.num_open == 0


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
        await d.until(lambda: bool(d.notices), timeout_s=5)
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
    """D17, E08: wrong counts, wrong widths, a stream that dies; the decoder stays whole."""
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
        assert e.servicer.fetches.num_open == 1
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


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"media_bytes": 1 << 40}, TooLarge),
        ({"media_bytes": 0}, InvalidRequest),
        ({"num_rows": 0}, InvalidRequest),
        ({"num_rows": 1 << 30}, TooLarge),
        ({"family": "g"}, InvalidRequest),
        ({"media_bytes": 3}, InvalidRequest),
    ],
)
async def test_an_encode_is_bounded(change, error) -> None:
    async with encoder() as e:
        plan = replace(media_plan("a"), **change)
        with pytest.raises(error):
            _, call = await e.encode(plan)
            _ = [m async for m in messages(call)]
        await eventually(lambda: not e.servicer.store.num_encodes)
        assert e.servicer.store.used_bytes == 0


async def test_a_short_medium_wrong_epochs_and_used_ids_are_refused() -> None:
    async with encoder() as e:
        plan = replace(media_plan("a"), media_bytes=100)
        _, call = await e.encode(plan)
        await call.done_writing()
        with pytest.raises(InvalidRequest):
            _ = [m async for m in messages(call)]
        encode_id, _ = await e.encode(media_plan("b"))
        for start, error in (
            (encoder_pb2.EncodeStart(encode_id=b"n", encoder_epoch=e.epoch + 1), EmbeddingLost),
            (encoder_pb2.EncodeStart(encode_id=encode_id), InvalidRequest),
            (encoder_pb2.EncodeStart(), InvalidRequest),
        ):
            start.plan.CopyFrom(media_plan("b").to_proto())
            call = e.stub.Encode()
            await call.write(encoder_pb2.EncodeRequest(start=start))
            with pytest.raises(error):
                _ = [m async for m in messages(call)]
        call = e.stub.Encode()
        await call.write(encoder_pb2.EncodeRequest(chunk=b"x"))
        with pytest.raises(InvalidRequest):
            _ = [m async for m in messages(call)]


async def test_full_and_draining_encoders_say_so() -> None:
    engine = PatternEngine(delay_s=30)
    async with encoder(engine, cache_bytes=60 * ROW, max_pending_patches=1) as e:
        await e.encode(media_plan("a"))
        with pytest.raises(ResourceExhausted) as caught:
            await e.encode(media_plan("b"))
        assert caught.value.retry_after_s
        await e.encode(media_plan("a"))  # a join takes no space
        e.servicer.draining = True
        with pytest.raises(ChiasmError):
            await e.encode(media_plan("a"))
        load = await e.stub.WatchLoad(common_pb2.WatchLoadRequest()).read()
        assert load.draining and load.running == 2 and load.pending_patches == 1


async def test_rows_may_be_written_straight_into_memory() -> None:
    """A one-sided transport needs no change in servicer, session, receiver or fetcher."""
    memory = LocalMemory()

    def open_receiver(slab):
        name = memory.register(slab.view())
        return lambda: LocalReceiver(name)

    sides = {"open_sender": memory.open_sender, "memory_types": frozenset({DRAM})}
    async with encoder(**sides) as e, decoder(open_receiver=open_receiver) as d:
        plan = media_plan("a")
        encode_id, _ = await e.encode(plan)
        d.want("r", plan, [e.source(encode_id)], until=PAGE_ROWS)
        await d.until(lambda: d.receiver.landed_until("r", 0, 0) == PAGE_ROWS)
        d.demands = [replace(d.demands[0], rows=Span(0, 50))]
        d.step()
        assert await d.rows("r", 50) == bytes_of(plan)
        d.drop("r")
        await d.idle()


class PostedSender:
    """A sender whose writes, once posted, cannot be called back: they end when `gate` opens."""

    def __init__(self, inner, gate: asyncio.Event) -> None:
        self._inner = inner
        self._gate = gate

    async def write(self, segment, **kwargs) -> int:
        async def posted() -> int:
            await self._gate.wait()
            return await self._inner.write(segment, **kwargs)

        task = asyncio.create_task(posted())
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                continue  # the promise of `Sender.write`: it ends after the last write
        return task.result()


async def test_a_broken_one_sided_fetch_is_fenced_before_its_pages_are_free() -> None:
    memory = LocalMemory()
    gate = asyncio.Event()

    def open_receiver(slab):
        name = memory.register(slab.view())
        return lambda: LocalReceiver(name)

    def open_sender(send, peers):
        return PostedSender(memory.open_sender(send, peers), gate)

    sides = {"open_sender": open_sender, "memory_types": frozenset({DRAM})}
    async with encoder(**sides) as e, decoder(open_receiver=open_receiver) as d:
        plan = media_plan("a")
        encode_id, _call = await e.encode(plan)
        d.want("r", plan, [e.source(encode_id)])
        await d.until(lambda: d.receiver.num_free_pages < 16)
        await asyncio.sleep(0.05)
        for call in tuple(d.fetcher._calls.values()):
            call.break_off()
        await d.until(lambda: any(isinstance(event, Broken) for event in d.events))
        d.drop("r")
        held = 16 - d.receiver.num_free_pages
        await asyncio.sleep(0.2)
        assert held and 16 - d.receiver.num_free_pages == held
        assert e.servicer.fetches.num_open == 1  # the write is still posted
        gate.set()
        await d.until(lambda: any(isinstance(event, Fenced) for event in d.events))
        await d.idle()
        assert e.servicer.fetches.num_open == 0
        e.servicer.fetches.check()


async def test_a_one_sided_writer_that_died_is_given_up_after_a_while() -> None:
    memory = LocalMemory()
    gate = asyncio.Event()

    def open_receiver(slab):
        name = memory.register(slab.view())
        return lambda: LocalReceiver(name)

    def open_sender(send, peers):
        return PostedSender(memory.open_sender(send, peers), gate)

    sides = {"open_sender": open_sender, "memory_types": frozenset({DRAM})}
    async with decoder(open_receiver=open_receiver) as d:
        async with encoder(**sides) as e:
            plan = media_plan("a")
            encode_id, _call = await e.encode(plan)
            d.want("r", plan, [e.source(encode_id)])
            await d.until(lambda: d.receiver.num_free_pages < 16)
            await asyncio.sleep(0.05)
        await d.until(lambda: any(isinstance(event, Broken) for event in d.events))
        assert d.receiver.num_free_pages < 16
        await d.idle()
        gate.set()


async def test_hundreds_of_aborts_leave_nothing_behind() -> None:
    """E05: aborted in encode, in transfer, after transfer; counts return to where they were."""
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
        await eventually(lambda: not e.servicer.store.num_encodes)
        await eventually(lambda: not e.servicer.fetches.num_open)
        e.servicer.store.check()
        e.servicer.fetches.check()
        assert e.servicer.store.free_bytes == e.servicer.store.cache_bytes
        assert engine.pending_patches == 0


async def test_a_decoder_that_dies_leaves_no_interest() -> None:
    async with encoder() as e:
        async with decoder() as d:
            plan = media_plan("a")
            encode_id, call = await e.encode(plan)
            d.want("r", plan, [e.source(encode_id)], until=8)
            await d.until(lambda: d.receiver.landed_until("r", 0, 0) == 8)
            assert e.servicer.fetches.num_open == 1
        await eventually(lambda: not e.servicer.fetches.num_open)
        call.cancel()
        await eventually(lambda: not e.servicer.store.num_encodes)
        assert e.servicer.store.free_bytes == e.servicer.store.cache_bytes


async def test_a_slow_reader_makes_a_slow_writer() -> None:
    """Rows are read from the store as the stream takes them, not ahead of it."""
    rows = 1 << 20  # 64 MiB
    engine = PatternEngine(segment_rows=rows)
    engine.make_buffer = ZeroBuffer
    async with encoder(engine) as e:
        plan = media_plan("a", rows)
        encode_id, _call = await e.encode(plan)
        await eventually(lambda: bool(e.servicer.store.find(encode_id).segments), timeout_s=30)
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
        await asyncio.sleep(0.5)
        assert 0 < num_read * ROW < 32 << 20
        call.cancel()
        await eventually(lambda: not e.servicer.fetches.num_open)
