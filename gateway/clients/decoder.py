"""Gateway -> decoder."""

from __future__ import annotations

import grpc

from chiasm.v1 import decoder_pb2, decoder_pb2_grpc
from gateway.clients.peer import PeerClient
from gateway.clients.stream import Duplex

GenerateStream = Duplex[decoder_pb2.GenerateRequest, decoder_pb2.GenerateResponse]


class DecoderClient(PeerClient):
    """One decoder behind one channel. The channel's owner closes it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = decoder_pb2_grpc.DecoderStub(channel)
        super().__init__(self._stub)

    def generate(self, *, timeout_s: float) -> GenerateStream:
        """A new Generate; send its start first, close it at the end."""
        stream = GenerateStream(self._stub.Generate(timeout=timeout_s))
        self.streams.add(stream)
        return stream
