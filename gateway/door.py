"""The front door: what who comes to the REST and the gRPC port shows, and what it is shown."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from chiasm.config import GatewayConfig, TlsConfig
from chiasm.tls import PeerTls


@dataclass(frozen=True, slots=True)
class Door:
    """`tls` None: plain text. `strangers`: a certificate is shown, none is asked for."""

    tls: PeerTls | None = None
    strangers: bool = False

    def context(self) -> ssl.SSLContext | None:
        """For the listener of the REST face."""
        return self.tls.context(strangers=self.strangers) if self.tls else None


def door_of(config: GatewayConfig, peers: PeerTls | None) -> Door:
    """What the settings ask for.

    Args:
        config: The gateway's.
        peers: What it shows encoders and decoders, whose files are the door's too if it has none.

    Raises:
        ValueError: A door without the files it takes.
    """
    front, tls = config.front, config.server.tls
    mode = front.front_door
    if mode == "auto":
        mode = "tls" if front.front_cert_file else "plain"
        if peers or front.front_ca_file:
            mode = "required"
    own = (front.front_cert_file, front.front_key_file, front.front_ca_file)
    if mode == "plain":
        if any(own):
            raise ValueError("--front-cert-file and the like are of no use with --front-door plain")
        return Door()
    cert, key, ca = own if any(own[:2]) else (tls.tls_cert_file, tls.tls_key_file, own[2])
    if not (cert and key):
        raise ValueError("--front-cert-file and --front-key-file: the door needs both")
    ca = ca or tls.tls_ca_file
    if mode == "required" and not ca:
        raise ValueError("--front-door required needs --front-ca-file, whose certificates get in")
    files = TlsConfig(tls_cert_file=cert, tls_key_file=key, tls_ca_file=ca)
    return Door(PeerTls(files), strangers=mode == "tls")
