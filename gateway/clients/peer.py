"""What the gateway asks of every peer, whatever it serves."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

import grpc

from chiasm.channel import messages, typed_errors
from chiasm.v1 import common_pb2, decoder_pb2_grpc, encoder_pb2_grpc
from gateway.clients.bundle import Bundle, BundleCall, BundledStream
from gateway.clients.stream import Duplex, OpenStreams, Request, Response

Stream = Duplex[Request, Response] | BundledStream[Request, Response]
"""A call: alone on a stream of its own, or one of a bundle."""


class PeerClient:
    """One peer behind one channel. Close it before the channel, which is its owner's.

    Args:
        stub: Of its service.
        open_bundle: Begins a stream of many calls.
    """

    def __init__(
        self,
        stub: encoder_pb2_grpc.EncoderStub | decoder_pb2_grpc.DecoderStub,
        open_bundle: Callable[[], BundleCall],
    ) -> None:
        self._peer = stub
        self._open_bundle = open_bundle
        self._bundle: Bundle | None = None
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

    async def close(self) -> None:
        """Ends the calls that share a stream."""
        if self._bundle is not None:
            await self._bundle.close()

    def open(
        self,
        start: Callable[..., grpc.aio.StreamStreamCall[Request, Response]],
        parse: Callable[[bytes], Response],
        *,
        timeout_s: float,
        bundled: bool,
    ) -> Stream[Request, Response]:
        """A new call, in `streams` until it ends. Send its start first, close it at the end.

        Args:
            start: Begins it on a stream of its own.
            parse: Reads what the peer says in a bundle.
            timeout_s: What it may take.
            bundled: The peer takes many on one stream.
        """
        stream: Stream[Request, Response]
        if bundled:
            stream = self.bundle().open(parse, timeout_s=timeout_s)
        else:
            stream = Duplex(start(timeout=timeout_s))
        self.streams.add(stream)
        return stream

    def bundle(self) -> Bundle:
        """The stream that many calls share."""
        if self._bundle is None or self._bundle.broken:
            self._bundle = Bundle(self._open_bundle())
        return self._bundle


def opener(channel: grpc.aio.Channel, method: str) -> Callable[[], BundleCall]:
    """Begins streams of many calls; bundles are written by hand."""
    method_of_many = channel.stream_stream(
        method, request_serializer=None, response_deserializer=common_pb2.Bundle.FromString
    )
    return lambda: method_of_many(None)
