"""Encode over a real port: joins, bounds, refusals, and what a broken stream leaves behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chiasm.channel import messages
from chiasm.errors import ChiasmError, EmbeddingLost, InvalidRequest, ResourceExhausted, TooLarge
from chiasm.v1 import common_pb2, encoder_pb2
from tests.unit.transfer.loopback import (
    ROW,
    PatternEngine,
    encoder,
    media_plan,
)
from tests.waiting import until


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
            await until(lambda: bool(engine.submitted))
            call.cancel()
        await until(lambda: not e.servicer.store.num_encodes)
        assert len(engine.cancelled) == len(engine.submitted)
        assert e.servicer.store.used_bytes == 0
        e.servicer.store.check()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"media_bytes": 1 << 40}, TooLarge),
        ({"media_bytes": 0}, InvalidRequest),
        ({"num_rows": 0}, InvalidRequest),
        ({"digest": b"short"}, InvalidRequest),
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
        await until(lambda: not e.servicer.store.num_encodes)
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
