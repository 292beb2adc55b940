"""Addresses as configured. A name behind several addresses is dialled by gRPC's own resolver."""

from __future__ import annotations

from collections.abc import AsyncIterator

from chiasm.config import GatewayConfig
from gateway.discovery.base import Discovery, Peer, PeerRole
from gateway.discovery.dns import DnsDiscovery
from gateway.discovery.kubernetes import KubernetesDiscovery


class StaticDiscovery:
    """The set never changes; peers behind it come and go, and are described again each time."""

    def __init__(self, *, encoders: tuple[str, ...], decoders: tuple[str, ...]) -> None:
        self._peers = frozenset(
            [Peer(PeerRole.ENCODER, _address(url)) for url in encoders]
            + [Peer(PeerRole.DECODER, _address(url)) for url in decoders]
        )

    async def watch(self) -> AsyncIterator[frozenset[Peer]]:
        """Yields once."""
        yield self._peers


def discovery_for(config: GatewayConfig) -> Discovery:
    """The source that `--discovery` names.

    Raises:
        ValueError: Addresses are missing or malformed, or there is no cluster to ask.
    """
    if not config.decoder_urls:
        raise ValueError(f"--decoder-urls is needed with --discovery {config.discovery}")
    if config.discovery == "kubernetes":
        return KubernetesDiscovery(encoders=config.encoder_urls, decoders=config.decoder_urls)
    encoders = tuple(_address(url) for url in config.encoder_urls)
    decoders = tuple(_address(url) for url in config.decoder_urls)
    if config.discovery == "dns":
        return DnsDiscovery(encoders=encoders, decoders=decoders)
    return StaticDiscovery(encoders=encoders, decoders=decoders)


def _address(url: str) -> str:
    """host:port of `host:port` or `grpc://host:port`."""
    scheme, separator, rest = url.strip().rstrip("/").partition("://")
    address = rest if separator else scheme
    host, _, port = address.rpartition(":")
    if (separator and scheme != "grpc") or not host or not port.isdigit():
        raise ValueError(f"{url!r} is not an address: write host:port")
    return address
