"""Gateway -> decoder."""

from __future__ import annotations

import grpc

from chiasm.v1 import decoder_pb2, decoder_pb2_grpc
from gateway.clients.bundle import BundledStream
from gateway.clients.peer import PeerClient, opener
from gateway.clients.stream import Duplex

GenerateStream = (
    Duplex[decoder_pb2.GenerateRequest, decoder_pb2.GenerateResponse]
    | BundledStream[decoder_pb2.GenerateRequest, decoder_pb2.GenerateResponse]
)


class DecoderClient(PeerClient):
    """One decoder behind one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = decoder_pb2_grpc.DecoderStub(channel)
        super().__init__(self._stub, opener(channel, "/chiasm.v1.Decoder/GenerateMany"))

    def generate(self, *, timeout_s: float, bundled: bool = False) -> GenerateStream:
        """A new Generate; send its start first, close it at the end.

        Args:
            timeout_s: What it may take.
            bundled: The decoder takes many on one stream.
        """
        stream: GenerateStream
        if bundled:
            parse = decoder_pb2.GenerateResponse.FromString
            stream = self.bundle().open(parse, timeout_s=timeout_s)
        else:
            stream = Duplex(self._stub.Generate(timeout=timeout_s))
        self.streams.add(stream)
        return stream
