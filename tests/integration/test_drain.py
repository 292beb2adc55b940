"""A decoder that is told to go finishes what is open, and then it goes: watchers do not keep it."""

from __future__ import annotations

import asyncio
import signal
import time

import grpc
import pytest

from chiasm.channel import connect
from chiasm.v1 import common_pb2, decoder_pb2, decoder_pb2_grpc
from tests.integration.stack import Stack

TOKENS, DRAIN_S = 400, 300

pytestmark = pytest.mark.timeout(600)


async def test_a_decoder_ends_with_its_last_stream() -> None:
    alone = Stack("demo")
    try:
        service = await asyncio.to_thread(
            alone.start("decoder_svc", "--drain-s", str(DRAIN_S)).wait_ready
        )
        async with connect(service.address) as channel:
            stub = decoder_pb2_grpc.DecoderStub(channel)
            watch = stub.WatchLoad(common_pb2.WatchLoadRequest(interval_ms=100))
            await watch.read()
            start = decoder_pb2.GenerateStart(
                context=common_pb2.RequestContext(request_id="long"),
                prompt_token_ids=[5, 6, 7],
                sampling=decoder_pb2.SamplingParams(max_tokens=TOKENS, n=1, ignore_eos=True),
            )
            call = stub.Generate()
            await call.write(decoder_pb2.GenerateRequest(start=start))
            tokens, kind = 0, ""
            while kind != "done":
                answer = await call.read()
                assert answer is not grpc.aio.EOF
                kind = answer.WhichOneof("kind")
                if not tokens and kind == "tokens":
                    service.kill(signal.SIGTERM)
                tokens += len(answer.tokens.token_ids)
            assert tokens == TOKENS
            began = time.monotonic()
            assert await asyncio.to_thread(service.process.wait, DRAIN_S / 3) == 0
            print(f"{time.monotonic() - began:.1f} s of {DRAIN_S} that the drain may take")
    finally:
        alone.stop()
