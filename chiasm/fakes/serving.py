"""Puts a fake behind a real port, for tests that speak gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from chiasm.server import Server
from chiasm.v1 import decoder_pb2_grpc, encoder_pb2_grpc


@asynccontextmanager
async def serving(
    servicer: encoder_pb2_grpc.EncoderServicer | decoder_pb2_grpc.DecoderServicer,
    *,
    port: int = 0,
    drain_s: float = 0.0,
) -> AsyncIterator[Server]:
    """Serves on loopback inside the block; `server.address` is where."""
    server = Server("127.0.0.1", port, drain_s=drain_s)
    if isinstance(servicer, encoder_pb2_grpc.EncoderServicer):
        encoder_pb2_grpc.add_EncoderServicer_to_server(servicer, server.grpc)
        name = "chiasm.v1.Encoder"
    else:
        decoder_pb2_grpc.add_DecoderServicer_to_server(servicer, server.grpc)
        name = "chiasm.v1.Decoder"
    await server.start((name,))
    await server.ready(True)
    try:
        yield server
    finally:
        await server.stop()
