"""Which encoder, which decoder: policy without grpc."""

from gateway.routing.base import Charge, Endpoint, Router
from gateway.routing.decoders import DecoderRouter, prefix_key
from gateway.routing.encoders import EncoderRouter

__all__ = ["Charge", "DecoderRouter", "Endpoint", "EncoderRouter", "Router", "prefix_key"]
