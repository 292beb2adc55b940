"""Settings every service has. Nothing large is on by default."""

from __future__ import annotations

from dataclasses import dataclass, field

from chiasm.config.bounds import check_not_negative


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """Mutual TLS between services; off without files. They may be replaced while in use."""

    tls_cert_file: str = ""
    """PEM file of the certificate shown to peers, with what leads to the CA; empty = no TLS."""
    tls_key_file: str = ""
    """PEM file of its private key."""
    tls_ca_file: str = ""
    """PEM file of the CA whose certificates make a peer; should be this deployment's own."""
    tls_peer_name: str = "chiasm"
    """DNS name that the certificates of all encoders and decoders hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where a service listens and how it stops."""

    host: str = "127.0.0.1"
    """Address to bind."""
    port: int = 0
    """Port to bind; 0 takes a free one and prints it."""
    advertise_host: str = ""
    """Host peers should dial; empty = `host`. Never a virtual IP."""
    metrics_port: int = -1
    """Port of Prometheus metrics, which asks for no key; -1 = off, 0 = a free one."""
    drain_s: float = 30.0
    """Seconds to finish work after SIGTERM before it is cancelled."""
    log_level: str = "info"
    """debug, info, warning or error."""
    tls: TlsConfig = field(default_factory=TlsConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port must be in [0, 65535], got {self.port}")
        check_not_negative(self, "drain_s")
