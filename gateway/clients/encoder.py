"""Gateway -> encoder."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import grpc

from chiasm.channel import messages, typed_errors
from chiasm.v1 import common_pb2, encoder_pb2, encoder_pb2_grpc
from gateway.clients.stream import Duplex, OpenStreams

_CHUNK_BYTES = 1 << 20

EncodeStream = Duplex[encoder_pb2.EncodeRequest, encoder_pb2.EncodeResponse]


class EncoderClient:
    """One encoder worker behind one channel. The channel's owner closes it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = encoder_pb2_grpc.EncoderStub(channel)
        self.streams = OpenStreams()

    async def describe(self, *, timeout_s: float) -> common_pb2.Description:
        """Who it is. Raises ChiasmError."""
        with typed_errors():
            answer: common_pb2.Description = await self._stub.Describe(
                common_pb2.DescribeRequest(), timeout=timeout_s
            )
        return answer

    def watch_load(self, *, interval_ms: int) -> AsyncGenerator[common_pb2.Load, None]:
        """Load until the encoder goes away."""
        return messages(self._stub.WatchLoad(common_pb2.WatchLoadRequest(interval_ms=interval_ms)))

    def encode(self, *, timeout_s: float) -> EncodeStream:
        """A new Encode; send its start first, close it at the end."""
        stream = EncodeStream(self._stub.Encode(timeout=timeout_s))
        self.streams.add(stream)
        return stream


async def send_media(stream: EncodeStream, data: bytes) -> None:
    """Writes the medium in chunks; stops early when the stream ends or is half-closed."""
    view = memoryview(data)
    for begin in range(0, len(view), _CHUNK_BYTES):
        chunk = bytes(view[begin : begin + _CHUNK_BYTES])
        if not await stream.send(encoder_pb2.EncodeRequest(chunk=chunk)):
            return
