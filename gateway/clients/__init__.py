"""Thin grpc.aio clients of encoders and decoders: deadlines and typed errors, no policy."""

from gateway.clients.decoder import DecoderClient, GenerateStream
from gateway.clients.encoder import EncoderClient, EncodeStream

__all__ = ["DecoderClient", "EncodeStream", "EncoderClient", "GenerateStream"]
