"""What the gateway asks of every peer, whatever it serves."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from chiasm.channel import messages, typed_errors
from chiasm.v1 import common_pb2, decoder_pb2_grpc, encoder_pb2_grpc
from gateway.clients.stream import OpenStreams


class PeerClient:
    """One peer behind one channel. The channel's owner closes it."""

    def __init__(self, stub: encoder_pb2_grpc.EncoderStub | decoder_pb2_grpc.DecoderStub) -> None:
        self._peer = stub
        self.streams = OpenStreams()

    async def describe(self, *, timeout_s: float) -> common_pb2.Description:
        """Who it is. Raises ChiasmError."""
        with typed_errors():
            answer: common_pb2.Description = await self._peer.Describe(
                common_pb2.DescribeRequest(), timeout=timeout_s
            )
        return answer

    def watch_load(self, *, interval_ms: int) -> AsyncGenerator[common_pb2.Load, None]:
        """Load until the peer goes away."""
        return messages(self._peer.WatchLoad(common_pb2.WatchLoadRequest(interval_ms=interval_ms)))
