"""Calls that share a stream behave as if each had its own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from chiasm.bundles import BundleServer
from chiasm.channel import connect
from chiasm.errors import (
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    ResourceExhausted,
    Unavailable,
)
from chiasm.fakes import EncoderFaults, FakeDecoder, FakeEncoder, Script, serving
from chiasm.plan import MediaPlan, Modality
from chiasm.server import Server
from chiasm.v1 import common_pb2, decoder_pb2, decoder_pb2_grpc, encoder_pb2
from gateway.clients import DecoderClient, EncoderClient
from gateway.clients.bundle import Bundle, BundledStream
from gateway.clients.encoder import send_media
from gateway.messages import Delta, Sampling
from tests.unit.gateway_core.conftest import RigMaker, chat, collect, picture, png
from tests.waiting import until

PLAN = MediaPlan(b"d" * 32, "f", Modality.IMAGE, 1, 1, 1, 1, (), 100, 3 << 20, "image/png")
Stream = BundledStream[Any, Any]


def start(what: str = "") -> decoder_pb2.GenerateRequest:
    context = common_pb2.RequestContext(request_id=what)
    return decoder_pb2.GenerateRequest(start=decoder_pb2.GenerateStart(context=context))


def token(value: int) -> decoder_pb2.GenerateResponse:
    return decoder_pb2.GenerateResponse(tokens=decoder_pb2.TokenDelta(token_ids=[value]))


class Peer(decoder_pb2_grpc.DecoderServicer):
    """Does what the id of a request says."""

    def __init__(self) -> None:
        self.streams = 0
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.half_closed: list[str] = []
        self.go_on = asyncio.Event()

    async def GenerateMany(self, requests: Any, context: Any) -> AsyncIterator[common_pb2.Bundle]:
        self.streams += 1
        server = BundleServer(self.Generate, decoder_pb2.GenerateRequest.FromString, method="test")
        async with aclosing(server.serve(requests)) as bundles:
            async for bundle in bundles:
                yield bundle

    async def Generate(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        what = (await anext(requests)).start.context.request_id
        self.begun.append(what)
        context.add_done_callback(lambda _: self.ended.append(what))
        match what:
            case "full":
                raise ResourceExhausted("full", retry_after_s=7.0)
            case "broken":
                raise RuntimeError("a bug")
            case "echo":
                async for message in requests:
                    yield token(message.stop_choice.choice)
                self.half_closed.append(what)
            case "deaf":
                await asyncio.sleep(60)
            case "count":
                for number in itertools.count():
                    yield token(number)
                    await asyncio.sleep(0)
            case _:
                yield token(1)
                await self.go_on.wait()
                yield token(2)


@asynccontextmanager
async def client_of(peer: Peer) -> AsyncIterator[DecoderClient]:
    server = Server("127.0.0.1", 0, drain_s=0.0)
    decoder_pb2_grpc.add_DecoderServicer_to_server(peer, server.grpc)
    await server.start(("chiasm.v1.Decoder",))
    try:
        async with connect(server.address) as channel:
            client = DecoderClient(channel)
            yield client
            await client.close()
    finally:
        await server.stop()


async def opened(client: DecoderClient, what: str, timeout_s: float = 30.0) -> Stream:
    stream = client.generate(timeout_s=timeout_s, bundled=True)
    assert isinstance(stream, BundledStream)
    assert await stream.send(start(what))
    return stream


async def read(stream: Stream) -> list[int]:
    return [message.tokens.token_ids[0] async for message in stream]


async def test_calls_share_a_stream_and_end_apart() -> None:
    peer = Peer()
    async with client_of(peer) as client:
        talk, full, wait = [await opened(client, what) for what in ("echo", "full", "wait")]
        stop = decoder_pb2.GenerateRequest(stop_choice=decoder_pb2.StopChoice(choice=5))
        assert await talk.send(stop)
        await talk.half_close()
        assert await read(talk) == [5]
        assert not await talk.send(stop)
        with pytest.raises(ResourceExhausted) as error:
            await read(full)
        assert error.value.retry_after_s == 7.0
        peer.go_on.set()
        assert await read(wait) == [1, 2]
        assert peer.streams == 1
        assert peer.half_closed == ["echo"]
        assert len(client.streams) == 0


async def test_a_bug_in_one_call_is_its_own(caplog: pytest.LogCaptureFixture) -> None:
    async with client_of(Peer()) as client:
        broken, wait = await opened(client, "broken"), await opened(client, "echo")
        with pytest.raises(Internal, match="^internal error$"):
            await read(broken)
        await wait.half_close()
        assert await read(wait) == []
        assert "a bug" in caplog.text


async def test_closing_one_ends_it_at_the_peer_and_no_other() -> None:
    peer = Peer()
    async with client_of(peer) as client:
        count, wait = await opened(client, "count"), await opened(client, "wait")
        async with aclosing(aiter(count)) as messages:
            assert (await anext(messages)).tokens.token_ids == [0]
        await count.close()
        assert not await count.send(start())
        await until(lambda: peer.ended == ["count"])
        peer.go_on.set()
        assert await read(wait) == [1, 2]


async def test_a_call_cancelled_in_the_bundle_that_opens_it_is_over_as_well() -> None:
    server = BundleServer(Peer().Generate, decoder_pb2.GenerateRequest.FromString, method="test")
    opening = common_pb2.Strand(call=1, message=start("deaf").SerializeToString())

    async def requests() -> AsyncIterator[common_pb2.Bundle]:
        yield common_pb2.Bundle(strands=[opening, common_pb2.Strand(call=1, cancelled=True)])

    async with asyncio.timeout(60):
        (bundle,) = [bundle async for bundle in server.serve(requests())]
    assert bundle.strands[0].end


async def test_a_deadline_is_kept_on_both_ends() -> None:
    peer = Peer()
    async with client_of(peer) as client:
        for timeout_s in (0.3, 3.0, 30.0):  # the peer has to hear of it in time
            deaf = client.generate(timeout_s=timeout_s, bundled=True)
            await deaf.send(start("deaf"))
            with pytest.raises(DeadlineExceeded):
                await read(deaf)
            if peer.begun:
                break
        assert peer.begun == ["deaf"]
        await until(lambda: peer.ended == ["deaf"])


async def test_the_peer_keeps_the_deadline_of_a_caller_that_is_silent() -> None:
    server = BundleServer(Peer().Generate, decoder_pb2.GenerateRequest.FromString, method="test")
    message = start("deaf").SerializeToString()

    async def requests() -> AsyncIterator[common_pb2.Bundle]:
        strand = common_pb2.Strand(call=1, message=message, timeout_s=0.05)
        yield common_pb2.Bundle(strands=[strand])

    (bundle,) = [bundle async for bundle in server.serve(requests())]
    assert bundle.strands[0].end
    assert bundle.strands[0].error.code == DeadlineExceeded.code


async def test_a_stream_that_breaks_takes_its_calls_and_the_next_finds_a_new_one() -> None:
    peer = Peer()
    async with client_of(peer) as client:
        waiting = [await opened(client, "wait") for _ in range(3)]
        async with aclosing(aiter(waiting[0])) as messages:
            await anext(messages)
        client.bundle()._call.cancel()
        raised = []
        for stream in waiting:
            with pytest.raises(Unavailable) as failure:
                await read(stream)
            raised.append(failure.value)
        assert len(set(map(id, raised))) == 3  # what one was raised through is not held by others
        peer.go_on.set()
        assert await read(await opened(client, "wait")) == [1, 2]
        assert peer.streams == 2


class Told:
    """A stream to a peer that says nothing."""

    def __init__(self) -> None:
        self.bundles: list[list[tuple[int, bool]]] = []
        """Call, and whether it is cancelled, of every strand."""

    async def write(self, data: bytes) -> None:
        strands = common_pb2.Bundle.FromString(data).strands
        self.bundles.append([(strand.call, strand.cancelled) for strand in strands])

    async def read(self) -> None:
        await asyncio.Event().wait()

    def cancel(self) -> None:
        pass


async def test_a_closed_call_is_cancelled_with_what_is_said_next_or_soon() -> None:
    told: Any = Told()
    bundle = Bundle(told)
    parse = decoder_pb2.GenerateResponse.FromString
    first: Stream = bundle.open(parse, timeout_s=30.0)
    second: Stream = bundle.open(parse, timeout_s=30.0)
    await first.send(start())
    await until(lambda: len(told.bundles) == 1)
    await first.close()
    await second.send(start())
    await until(lambda: len(told.bundles) == 2)
    await second.close()
    await until(lambda: len(told.bundles) == 3)
    assert told.bundles == [[(1, False)], [(1, True), (2, False)], [(2, True)]]
    await bundle.close()


async def test_a_client_closed_at_once_ends_its_calls() -> None:
    async with client_of(Peer()) as client:
        deaf = await opened(client, "deaf")
        await client.close()
        with pytest.raises(Unavailable, match="closed"):
            await read(deaf)


async def test_a_peer_given_up_fails_its_calls_at_once() -> None:
    async with client_of(Peer()) as client:
        deaf = await opened(client, "deaf")
        asyncio.get_running_loop().call_later(
            0.05, client.streams.give_up, Unavailable("does not answer")
        )
        with pytest.raises(Unavailable, match="does not answer"):
            await read(deaf)


async def test_who_sends_more_than_is_taken_in_is_refused() -> None:
    server = BundleServer(Peer().Generate, decoder_pb2.GenerateRequest.FromString, method="test")

    async def requests() -> AsyncIterator[common_pb2.Bundle]:
        yield _bundle(1, start("deaf").SerializeToString())
        for _ in range(65):
            yield _bundle(1, bytes(1 << 20))
            await asyncio.sleep(0)

    (bundle,) = [bundle async for bundle in server.serve(requests())]
    assert bundle.strands[0].error.code == ResourceExhausted.code


async def test_what_is_said_past_a_behaviour_comes_in_order_and_only_while_there_is_room() -> None:
    said = []

    async def behaviour(requests: Any, call: Any) -> AsyncIterator[Any]:
        await anext(requests)
        yield token(1)
        said.append(call.write_now(token(2).SerializeToString()))
        yield token(3)
        large = decoder_pb2.TokenDelta(token_ids=[4] * (5 << 20))
        said.append(call.write_now(decoder_pb2.GenerateResponse(tokens=large).SerializeToString()))
        said.append(call.write_now(token(5).SerializeToString()))  # nobody has read the last
        yield token(6)
        said.append(call.write_now(token(7).SerializeToString()))

    async def requests() -> AsyncIterator[common_pb2.Bundle]:
        yield _bundle(1, start().SerializeToString())

    server = BundleServer(behaviour, decoder_pb2.GenerateRequest.FromString, method="test")
    strands = [strand async for bundle in server.serve(requests()) for strand in bundle.strands]
    answers = [decoder_pb2.GenerateResponse.FromString(strand.message) for strand in strands[:-1]]
    assert [answer.tokens.token_ids[0] for answer in answers] == [1, 2, 3, 4, 6, 7]
    assert said == [True, True, False, True]
    assert strands[-1].end and not strands[-1].HasField("error")


@pytest.mark.parametrize(
    "strands",
    [
        [common_pb2.Strand(call=1)],
        [common_pb2.Strand(call=1, end=True), common_pb2.Strand(call=2, cancelled=True)],
        [common_pb2.Strand()],
        [common_pb2.Strand(message=b"no number")],
    ],
)
async def test_strands_that_belong_to_no_call_are_nobodys(strands: list[Any]) -> None:
    server = BundleServer(Peer().Generate, decoder_pb2.GenerateRequest.FromString, method="test")

    async def requests() -> AsyncIterator[common_pb2.Bundle]:
        yield common_pb2.Bundle(strands=strands)

    assert [bundle async for bundle in server.serve(requests())] == []


async def test_a_message_that_cannot_be_read_is_the_callers_fault() -> None:
    server = BundleServer(Peer().Generate, decoder_pb2.GenerateRequest.FromString, method="test")

    async def requests() -> AsyncIterator[common_pb2.Bundle]:
        yield _bundle(1, b"\xff\xff\xff")

    (bundle,) = [bundle async for bundle in server.serve(requests())]
    assert bundle.strands[0].error.code == InvalidRequest.code


class Babbler(Peer):
    """Answers with bytes that are no message, and with strands of calls that nobody has made."""

    async def GenerateMany(self, requests: Any, context: Any) -> AsyncIterator[common_pb2.Bundle]:
        async for bundle in requests:
            for strand in bundle.strands:
                junk = common_pb2.Strand(call=strand.call + 1000, message=b"\xff", end=True)
                yield common_pb2.Bundle(strands=[junk])
                said = b"\xff\xff" if strand.call == 1 else token(9).SerializeToString()
                yield _bundle(strand.call, said)
                yield common_pb2.Bundle(strands=[common_pb2.Strand(call=strand.call, end=True)])


async def test_a_peer_that_babbles_fails_the_call_it_babbles_at() -> None:
    async with client_of(Babbler()) as client:
        first, second = await opened(client, "a"), await opened(client, "b")
        with pytest.raises(Unavailable):
            await read(first)
        assert await read(second) == [9]


async def test_large_messages_arrive_whole_beside_small_ones() -> None:
    encoder, media = FakeEncoder(), [bytes([n]) * (3 << 20) for n in range(3)]
    async with serving(encoder) as server, connect(server.address) as channel:
        client = EncoderClient(channel)
        await asyncio.gather(*(_encode(client, bytes([n]), data) for n, data in enumerate(media)))
        assert [encoder.media[bytes([n])] for n in range(3)] == media
        await client.close()


async def test_a_refused_call_stops_being_written_to() -> None:
    encoder = FakeEncoder(faults=EncoderFaults(exhausted=True))
    async with serving(encoder) as server, connect(server.address) as channel:
        client = EncoderClient(channel)
        with pytest.raises(ResourceExhausted):
            await _encode(client, b"e", bytes(3 << 20))
        await client.close()


async def _encode(client: EncoderClient, encode_id: bytes, data: bytes) -> None:
    stream = client.encode(timeout_s=30, bundled=True)
    request = encoder_pb2.EncodeStart(encode_id=encode_id, plan=PLAN.to_proto())
    await stream.send(encoder_pb2.EncodeRequest(start=request))
    async for message in stream:
        if message.HasField("accepted"):
            await send_media(stream, data)
        elif message.HasField("done"):
            await stream.half_close()


@pytest.mark.parametrize("bundled", [True, False], ids=["bundled", "alone"])
async def test_the_pipeline_says_the_same_either_way(make_rig: RigMaker, bundled: bool) -> None:
    script = Script(token_ids=(104, 105, 33), token_s=0.01)
    rig = await make_rig(
        encoders=[FakeEncoder(bundled=bundled)], decoders=[FakeDecoder(script, bundled=bundled)]
    )
    job = chat("what?", picture(png()), sampling=Sampling(max_tokens=8))
    for events in await asyncio.gather(*(collect(rig.pipeline, job) for _ in range(5))):
        deltas = [event for event in events if isinstance(event, Delta)]
        assert [i for delta in deltas for i in delta.token_ids] == [104, 105, 33]
    await rig.settle()
    rig.pipeline.admission.check()


def _bundle(call: int, message: bytes) -> common_pb2.Bundle:
    return common_pb2.Bundle(strands=[common_pb2.Strand(call=call, message=message)])
