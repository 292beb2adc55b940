"""The config tree: frozen dataclasses, validated once. File < environment < flags."""

from chiasm.config.decoder import DecoderConfig
from chiasm.config.encoder import EncoderConfig
from chiasm.config.gateway import GatewayConfig
from chiasm.config.server import ServerConfig, TlsConfig

__all__ = ["DecoderConfig", "EncoderConfig", "GatewayConfig", "ServerConfig", "TlsConfig"]
