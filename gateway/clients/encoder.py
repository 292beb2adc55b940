"""Gateway -> encoder."""

from __future__ import annotations

import grpc

from chiasm.v1 import encoder_pb2, encoder_pb2_grpc
from gateway.clients.peer import PeerClient
from gateway.clients.stream import Duplex

_CHUNK_BYTES = 1 << 20
_LENGTH_DELIMITED = 2
_CHUNK_TAG = encoder_pb2.EncodeRequest.CHUNK_FIELD_NUMBER << 3 | _LENGTH_DELIMITED

EncodeStream = Duplex[encoder_pb2.EncodeRequest | bytes, encoder_pb2.EncodeResponse]
"""What is written is a request, or one that is already in its wire format."""


class EncoderClient(PeerClient):
    """One encoder worker behind one channel. The channel's owner closes it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        super().__init__(encoder_pb2_grpc.EncoderStub(channel))
        self._encode = channel.stream_stream(
            "/chiasm.v1.Encoder/Encode",
            request_serializer=_serialize,
            response_deserializer=encoder_pb2.EncodeResponse.FromString,
        )

    def encode(self, *, timeout_s: float) -> EncodeStream:
        """A new Encode; send its start first, close it at the end."""
        stream = EncodeStream(self._encode(None, timeout=timeout_s))
        self.streams.add(stream)
        return stream


async def send_media(stream: EncodeStream, data: bytes) -> None:
    """Writes the medium in chunks; stops early when the stream ends or is half-closed."""
    view = memoryview(data)
    for begin in range(0, len(view), _CHUNK_BYTES):
        if not await stream.send(chunk_request(view[begin : begin + _CHUNK_BYTES])):
            return


def chunk_request(data: bytes | memoryview) -> bytes:
    """`EncodeRequest(chunk=data)` in its wire format, with one copy where protobuf makes three."""
    head = bytearray((_CHUNK_TAG,))
    size = len(data)
    while size >= 0x80:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return b"".join((head, data))


def _serialize(message: encoder_pb2.EncodeRequest | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
