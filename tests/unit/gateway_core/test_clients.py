"""Calls that end while something is being written to them."""

from __future__ import annotations

import asyncio

from chiasm.channel import connect
from chiasm.errors import ChiasmError
from chiasm.fakes import EncoderFaults, FakeEncoder, serving
from chiasm.plan import MediaPlan, Modality
from chiasm.v1 import encoder_pb2
from gateway.clients import EncoderClient

PLAN = MediaPlan(b"d" * 32, "f", Modality.IMAGE, 1, 1, 1, 1, (), 100, 10, "image/png")


async def test_a_call_that_ends_under_a_write_may_be_tried_elsewhere() -> None:
    """grpc.aio then says INTERNAL, whatever the peer said."""
    fake = FakeEncoder(faults=EncoderFaults(exhausted=True))
    start = encoder_pb2.EncodeStart(encode_id=b"e", plan=PLAN.to_proto())
    chunk = encoder_pb2.EncodeRequest(chunk=bytes(200_000))
    errors: list[ChiasmError] = []
    async with serving(fake) as server, connect(server.address) as channel:
        client = EncoderClient(channel)
        for _ in range(50):
            stream = client.encode(timeout_s=60)
            await stream.send(encoder_pb2.EncodeRequest(start=start))
            while await stream.send(chunk):
                await asyncio.sleep(0)
            try:
                async for _ in stream:
                    pass
            except ChiasmError as error:
                errors.append(error)
    assert len(errors) == 50
    assert all(error.retryable for error in errors), {error.code for error in errors}
