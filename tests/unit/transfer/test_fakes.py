"""The fakes keep the contract that they stand in for."""

from __future__ import annotations

import math
import struct
from collections.abc import AsyncIterator

import grpc
import pytest

from chiasm.channel import connect, messages
from chiasm.errors import EmbeddingLost, ResourceExhausted, Unavailable
from chiasm.fakes import EncoderFaults, FakeDecoder, FakeEncoder, Script, pattern_rows, serving
from chiasm.fakes.rows import NAN_BYTE
from chiasm.plan import Cause, MediaPlan, Modality, Part, Promise, Source, Span
from chiasm.v1 import common_pb2, decoder_pb2, decoder_pb2_grpc, encoder_pb2, encoder_pb2_grpc
from tests.waiting import until

PLAN = MediaPlan(b"d" * 32, "f", Modality.IMAGE, 1, 1, 1, 1, (), 100, 10, "image/png")


@pytest.fixture
async def encoder() -> AsyncIterator[tuple[FakeEncoder, grpc.aio.Channel]]:
    fake = FakeEncoder()
    async with serving(fake) as server, connect(server.address) as channel:
        yield fake, channel


@pytest.fixture
async def decoder() -> AsyncIterator[tuple[FakeDecoder, grpc.aio.Channel]]:
    fake = FakeDecoder()
    async with serving(fake) as server, connect(server.address) as channel:
        yield fake, channel


async def encode(
    channel: grpc.aio.Channel, *, refused: bool = False, **start: object
) -> grpc.aio.StreamStreamCall:
    call = encoder_pb2_grpc.EncoderStub(channel).Encode()
    opening = encoder_pb2.EncodeStart(encode_id=b"e", plan=PLAN.to_proto(), **start)
    await call.write(encoder_pb2.EncodeRequest(start=opening))
    if refused:  # a write that meets the end of the call would hide its status
        return call
    await call.write(encoder_pb2.EncodeRequest(chunk=b"12345"))
    await call.write(encoder_pb2.EncodeRequest(chunk=b"67890"))
    return call


async def test_encode_reports_segments_and_holds_until_half_close(encoder) -> None:
    fake, channel = encoder
    call = await encode(channel)
    kinds = []
    async for response in messages(call):
        kinds.append(response.WhichOneof("kind"))
        if kinds[-1] == "done":
            assert fake.open_encodes == 1
            await call.done_writing()
    assert kinds == ["accepted", "ready", "ready", "done"]
    assert fake.media == {b"e": b"1234567890"}
    assert fake.open_encodes == 0


async def test_encode_refuses_and_fails_as_told(encoder) -> None:
    fake, channel = encoder
    fake.faults = EncoderFaults(fail=Cause.INVALID_MEDIA)
    call = await encode(channel)
    got = [m async for m in messages(call)]
    assert Cause.from_proto(got[-1].error.cause) is Cause.INVALID_MEDIA
    fake.faults = EncoderFaults(exhausted=True)
    with pytest.raises(ResourceExhausted):
        _ = [m async for m in messages(await encode(channel, refused=True))]
    fake.faults = EncoderFaults()
    stale = fake.epoch + 1
    with pytest.raises(EmbeddingLost):
        _ = [m async for m in messages(await encode(channel, refused=True, encoder_epoch=stale))]


async def test_fetch_writes_what_is_granted(encoder) -> None:
    fake, channel = encoder
    held = await encode(channel)
    call = encoder_pb2_grpc.EncoderStub(channel).Fetch()
    await call.write(
        encoder_pb2.FetchRequest(open=encoder_pb2.FetchOpen(fetch_id=b"f", encode_id=b"e"))
    )
    data: dict[int, bytes] = {}
    kinds = []
    async for response in messages(call):
        kinds.append(response.WhichOneof("kind"))
        if response.HasField("ready"):
            place = encoder_pb2.Destination(rows=response.ready.rows)
            grant = encoder_pb2.FetchGrant(segment=response.ready.segment, destinations=[place])
            await call.write(encoder_pb2.FetchRequest(grant=grant))
        if response.HasField("chunk"):
            data[response.chunk.segment] = response.chunk.data
    assert sorted(kinds) == sorted(
        ["accepted", *["ready", "chunk", "written"] * 2, "done", "quiesced"]
    )
    assert data[0] + data[1] == pattern_rows(PLAN.digest, Span(0, 100), 32)
    await held.done_writing()


def test_pattern_rows_are_finite_and_differ_and_the_nan_byte_is_not() -> None:
    rows = pattern_rows(b"a", Span(0, 3), 32)
    for kind in ("f", "e"):
        values = [v for (v,) in struct.iter_unpack(f"<{kind}", rows)]
        assert all(math.isfinite(v) for v in values)
        assert all(math.isnan(v) for (v,) in struct.iter_unpack(f"<{kind}", NAN_BYTE * 32))
    assert len({rows[:32], rows[32:64], rows[64:], pattern_rows(b"b", Span(0, 1), 32)}) == 4


async def generate(channel: grpc.aio.Channel, **sampling: int) -> grpc.aio.StreamStreamCall:
    promise = Promise(0, PLAN, 0, (Part(0, Span(0, 100), Source(b"e", "x:1", 1)),))
    start = decoder_pb2.GenerateStart(
        prompt_token_ids=[5, 6],
        promises=[promise.to_proto()],
        sampling=decoder_pb2.SamplingParams(**sampling),
    )
    call = decoder_pb2_grpc.DecoderStub(channel).Generate()
    await call.write(decoder_pb2.GenerateRequest(start=start))
    return call


async def test_generate_follows_its_script(decoder) -> None:
    fake, channel = decoder
    fake.script = Script(token_ids=(7, 8), per_choice={1: (9, 9, 9, 9)})
    got = [m async for m in messages(await generate(channel, n=2, max_tokens=4))]
    ids = [(m.tokens.choice, *m.tokens.token_ids) for m in got if m.HasField("tokens")]
    assert ids == [(0, 7), (1, 9), (0, 8), (1, 9), (1, 9), (1, 9)]
    reasons = {m.finished.choice: m.finished.reason for m in got if m.HasField("finished")}
    assert reasons == {0: decoder_pb2.FINISH_REASON_STOP, 1: decoder_pb2.FINISH_REASON_LENGTH}
    assert got[0].HasField("accepted") and got[1].HasField("landed")
    assert got[-1].done.completion_tokens == 6
    assert fake.running == 0


async def test_generate_waits_for_a_redirect_after_a_loss(decoder) -> None:
    fake, channel = decoder
    fake.script = Script(lose=(Cause.LOST,))
    call = await generate(channel)
    kinds = []
    async for response in messages(call):
        kinds.append(response.WhichOneof("kind"))
        if response.HasField("embedding_lost"):
            redirect = decoder_pb2.Redirect(attempt=response.embedding_lost.attempt + 1)
            await call.write(decoder_pb2.GenerateRequest(redirect=redirect))
    assert kinds[:3] == ["accepted", "embedding_lost", "landed"]
    assert fake.generations[0].redirects[0].attempt == 2


async def test_generate_stops_a_choice_dies_and_is_cancelled(decoder) -> None:
    fake, channel = decoder

    async def stopped(step: int) -> None:
        if step == 50:
            await until(lambda: fake.generations[0].stopped)

    fake.script = Script(token_ids=tuple(range(100)), step_when=stopped)
    call = await generate(channel, max_tokens=100)
    async for response in messages(call):
        if response.HasField("tokens"):
            stop = decoder_pb2.StopChoice(choice=0)
            await call.write(decoder_pb2.GenerateRequest(stop_choice=stop))
            break
    tail = [m async for m in messages(call)]
    assert sum(m.HasField("tokens") for m in tail) < 99
    fake.script = Script(die_after=1)
    with pytest.raises(Unavailable):
        _ = [m async for m in messages(await generate(channel))]
    fake.script = Script(land_s=3600)
    call = await generate(channel)
    await call.read()
    assert fake.running == 1
    call.cancel()
    await until(lambda: not fake.running)


async def test_describe_names_the_role(encoder, decoder) -> None:
    for (fake, channel), stub in (
        (encoder, encoder_pb2_grpc.EncoderStub),
        (decoder, decoder_pb2_grpc.DecoderStub),
    ):
        description = await stub(channel).Describe(common_pb2.DescribeRequest())
        assert description.epoch == fake.epoch
        assert description.contract.major == 1
        assert description.role in ("encoder", "decoder")
