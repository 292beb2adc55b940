"""A decoder that is told to go finishes what is open, and then it goes: watchers do not keep it."""

from __future__ import annotations

import asyncio
import signal
import time

import grpc

from chiasm.channel import connect
from chiasm.v1 import common_pb2, decoder_pb2, decoder_pb2_grpc
from tests.integration.stack import Stack

TOKENS = 400


async def test_a_decoder_ends_with_its_last_stream() -> None:
    alone = Stack("demo")
    try:
        service = await asyncio.to_thread(alone.start("decoder_svc", "--drain-s", "60").wait_ready)
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
            assert await asyncio.to_thread(service.process.wait, 20) == 0
            assert time.monotonic() - began < 10
    finally:
        alone.stop()
