"""Peers that freeze, and peers that say impossible things."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator

import grpc
import pytest

from chiasm.channel import connect
from chiasm.fakes import FakeEncoder, serving
from chiasm.v1 import common_pb2, encoder_pb2, encoder_pb2_grpc
from tests.integration.cluster import PATIENCE_S
from tests.integration.media import circle, encode
from tests.integration.stack import Stack

_END = 2**64 - 1
NOTICED_S = 90.0  # twenty, as the channel is set; TCP would be silent for ever


async def test_a_frozen_peer_is_noticed_in_the_middle_of_a_stream() -> None:
    """Half-open: the connection stands, nothing comes through any more."""
    frozen = asyncio.Event()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if frozen.is_set():
                await asyncio.Event().wait()
            writer.write(data)

    async with serving(FakeEncoder()) as server, asyncio.TaskGroup() as pumps:

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            answers, asks = await asyncio.open_connection("127.0.0.1", server.port)
            writers.extend((writer, asks))
            tasks.append(pumps.create_task(pump(reader, asks)))
            tasks.append(pumps.create_task(pump(answers, writer)))

        tasks: list[asyncio.Task[None]] = []
        writers: list[asyncio.StreamWriter] = []
        proxy = await asyncio.start_server(accept, "127.0.0.1", 0)
        channel = connect(f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}")
        call = encoder_pb2_grpc.EncoderStub(channel).WatchLoad(common_pb2.WatchLoadRequest())
        await call.read()
        frozen.set()
        began = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(NOTICED_S):
                while True:
                    await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - began < NOTICED_S
        await channel.close()
        proxy.close()
        for task in tasks:
            task.cancel()
        for writer in writers:
            writer.close()
        await asyncio.gather(*(w.wait_closed() for w in writers), return_exceptions=True)


@pytest.fixture
async def encoder(stack: Stack) -> AsyncIterator[encoder_pb2_grpc.EncoderStub]:
    address = next(s.address for s in stack.services if s.name == "encoder_svc")
    async with connect(address) as channel:
        yield encoder_pb2_grpc.EncoderStub(channel)


def encode_start(media: bytes) -> encoder_pb2.EncodeStart:
    plan = common_pb2.MediaPlan(
        digest=secrets.token_bytes(32),
        family="qwen2_5_vl",
        modality="MODALITY_IMAGE",
        source_height=112,
        source_width=112,
        resized_height=112,
        resized_width=112,
        grids=[common_pb2.Grid(t=1, h=8, w=8)],
        num_rows=16,
        media_bytes=len(media),
        media_type="image/png",
    )
    return encoder_pb2.EncodeStart(encode_id=secrets.token_bytes(16), plan=plan)


async def test_ranges_without_end_are_refused(encoder: encoder_pb2_grpc.EncoderStub) -> None:
    described = await encoder.Describe(common_pb2.DescribeRequest())
    endless = common_pb2.Range(begin=0, end=_END)
    media = encode(circle(size=(112, 112)))
    start = encode_start(media)

    def opened(rows: common_pb2.Range) -> encoder_pb2.FetchRequest:
        return encoder_pb2.FetchRequest(
            open=encoder_pb2.FetchOpen(
                fetch_id=secrets.token_bytes(16),
                digest=start.plan.digest,
                rows=rows,
                encode_id=start.encode_id,
                encoder_epoch=described.epoch,
                rows_format=described.rows,
            )
        )

    async with asyncio.timeout(PATIENCE_S):
        refused = encoder.Fetch()
        await refused.write(opened(endless))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await refused.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

        encoding = encoder.Encode()
        await encoding.write(encoder_pb2.EncodeRequest(start=start))
        await encoding.write(encoder_pb2.EncodeRequest(chunk=media))
        while (await encoding.read()).WhichOneof("kind") != "done":
            pass
        fetch = encoder.Fetch()
        await fetch.write(opened(common_pb2.Range(begin=0, end=16)))
        while (await fetch.read()).WhichOneof("kind") != "ready":
            pass
        place = encoder_pb2.Destination(memory_type="stream", length=5, rows=endless)
        grant = encoder_pb2.FetchGrant(segment=0, destinations=[place])
        await fetch.write(encoder_pb2.FetchRequest(grant=grant))
        assert (await fetch.read()).WhichOneof("kind") == "error"
        assert (await fetch.read()).WhichOneof("kind") == "quiesced"
        await encoding.done_writing()
