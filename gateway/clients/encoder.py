"""Gateway -> encoder."""

from __future__ import annotations

import grpc

from chiasm.v1 import encoder_pb2, encoder_pb2_grpc
from gateway.clients.peer import PeerClient
from gateway.clients.stream import Duplex

_CHUNK_BYTES = 1 << 20

EncodeStream = Duplex[encoder_pb2.EncodeRequest, encoder_pb2.EncodeResponse]


class EncoderClient(PeerClient):
    """One encoder worker behind one channel. The channel's owner closes it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = encoder_pb2_grpc.EncoderStub(channel)
        super().__init__(self._stub)

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
