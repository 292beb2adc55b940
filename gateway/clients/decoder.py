"""Gateway -> decoder."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import grpc

from chiasm.channel import messages, typed_errors
from chiasm.v1 import common_pb2, decoder_pb2, decoder_pb2_grpc
from gateway.clients.stream import Duplex, OpenStreams

GenerateStream = Duplex[decoder_pb2.GenerateRequest, decoder_pb2.GenerateResponse]


class DecoderClient:
    """One decoder behind one channel. The channel's owner closes it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = decoder_pb2_grpc.DecoderStub(channel)
        self.streams = OpenStreams()

    async def describe(self, *, timeout_s: float) -> common_pb2.Description:
        """Who it is. Raises ChiasmError."""
        with typed_errors():
            answer: common_pb2.Description = await self._stub.Describe(
                common_pb2.DescribeRequest(), timeout=timeout_s
            )
        return answer

    def watch_load(self, *, interval_ms: int) -> AsyncGenerator[common_pb2.Load, None]:
        """Load until the decoder goes away."""
        return messages(self._stub.WatchLoad(common_pb2.WatchLoadRequest(interval_ms=interval_ms)))

    def generate(self, *, timeout_s: float) -> GenerateStream:
        """A new Generate; send its start first, close it at the end."""
        stream = GenerateStream(self._stub.Generate(timeout=timeout_s))
        self.streams.add(stream)
        return stream
