"""Gateway -> decoder."""

from __future__ import annotations

import grpc

from chiasm.v1 import decoder_pb2, decoder_pb2_grpc
from gateway.clients.peer import PeerClient, Stream, opener

GenerateStream = Stream[decoder_pb2.GenerateRequest, decoder_pb2.GenerateResponse]


class DecoderClient(PeerClient):
    """One decoder behind one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = decoder_pb2_grpc.DecoderStub(channel)
        super().__init__(self._stub, opener(channel, "/chiasm.v1.Decoder/GenerateMany"))

    def generate(self, *, timeout_s: float, bundled: bool = False) -> GenerateStream:
        """A new Generate; see `open`."""
        parse = decoder_pb2.GenerateResponse.FromString
        return self.open(self._stub.Generate, parse, timeout_s=timeout_s, bundled=bundled)
