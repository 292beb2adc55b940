"""Gateway -> encoder."""

from __future__ import annotations

from functools import partial

import grpc

from chiasm.v1 import encoder_pb2, encoder_pb2_grpc
from gateway.clients.framing import Buffers, field_head
from gateway.clients.peer import PeerClient, Stream, opener

_CHUNK_BYTES = 1 << 20

EncodeStream = Stream[encoder_pb2.EncodeRequest | Buffers, encoder_pb2.EncodeResponse]
"""What is written is a request, or one that is already in its wire format."""


class EncoderClient(PeerClient):
    """One encoder worker behind one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        super().__init__(
            encoder_pb2_grpc.EncoderStub(channel), opener(channel, "/chiasm.v1.Encoder/EncodeMany")
        )
        self._encode = channel.stream_stream(
            "/chiasm.v1.Encoder/Encode",
            request_serializer=_serialize,
            response_deserializer=encoder_pb2.EncodeResponse.FromString,
        )

    def encode(self, *, timeout_s: float, bundled: bool = False) -> EncodeStream:
        """A new Encode; see `open`."""
        parse = encoder_pb2.EncodeResponse.FromString
        start = partial(self._encode, None)
        return self.open(start, parse, timeout_s=timeout_s, bundled=bundled)


async def send_media(stream: EncodeStream, data: bytes) -> None:
    """Writes the medium in chunks; stops early when the stream ends or is half-closed."""
    view = memoryview(data)
    for begin in range(0, len(view), _CHUNK_BYTES):
        if not await stream.send(chunk_request(view[begin : begin + _CHUNK_BYTES])):
            return


def chunk_request(data: memoryview) -> Buffers:
    """`EncodeRequest(chunk=data)` in its wire format, not yet copied."""
    return field_head(encoder_pb2.EncodeRequest.CHUNK_FIELD_NUMBER, len(data)), data


def _serialize(message: encoder_pb2.EncodeRequest | Buffers) -> bytes:
    return b"".join(message) if isinstance(message, tuple) else message.SerializeToString()
