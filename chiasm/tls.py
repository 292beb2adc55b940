"""Mutual TLS: the certificate a process shows, and the CA it knows peers and clients by.

Files are looked at again for each handshake: what replaces them counts for the next connection,
without a restart. A pair that does not fit, as while it is being written, leaves the one before.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc

from chiasm.config.server import TlsConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Pair:
    """PEM texts, and what the files looked like when they were read."""

    certificate: bytes
    key: bytes
    ca: bytes
    seen: tuple[tuple[int, int, int], ...]


class PeerTls:
    """Owns what was read last. Used by any thread.

    Args:
        config: Names of the files. Without a CA nobody is known: only strangers can be let in.

    Raises:
        ValueError: A file cannot be read, or key and certificate do not belong together.
    """

    def __init__(self, config: TlsConfig) -> None:
        names = (config.tls_cert_file, config.tls_key_file, config.tls_ca_file)
        self._files = tuple(Path(name) for name in names if name)
        self.peer_name = config.tls_peer_name
        self._lock = threading.Lock()
        self._refused: tuple[tuple[int, int, int], ...] = ()
        self._version = 1
        self._trouble = ""
        self._pair = self._read()

    @property
    def version(self) -> int:
        """Grows when the files have changed."""
        return self._fresh()[1]

    def server_credentials(self, *, strangers: bool = False) -> grpc.ServerCredentials:
        """For a port that only peers, or also strangers, get through; of the newest files."""

        def configuration() -> grpc.ServerCertificateConfiguration:
            pair, _ = self._fresh()
            keys = [(pair.key, pair.certificate)]
            return grpc.ssl_server_certificate_configuration(keys, None if strangers else pair.ca)

        return grpc.dynamic_ssl_server_credentials(
            configuration(), configuration, require_client_authentication=not strangers
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a channel to a peer; of the files as they are now, so look at `version`."""
        pair, _ = self._fresh()
        return grpc.ssl_channel_credentials(pair.ca, pair.key, pair.certificate)

    def context(self, *, strangers: bool = False) -> ssl.SSLContext:
        """For a port of ours that is not gRPC's; each handshake is of the newest files.

        What one handshake has shown does not count for the next: no session is resumed. That takes
        TLS 1.3: before it OpenSSL keeps sessions by their ids, and Python cannot forbid it. Where
        strangers are served nothing is shown, and TLS 1.2 will do.
        """
        context = self._context(strangers)
        latest = self.version, context

        def renew(connection: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
            nonlocal latest
            if (version := self.version) != latest[0]:
                latest = version, self._context(strangers)
            connection.context = latest[1]

        context.sni_callback = renew
        return context

    def _context(self, strangers: bool) -> ssl.SSLContext:
        self._fresh()
        certificate, key, *ca = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        oldest = ssl.TLSVersion.TLSv1_2 if strangers else ssl.TLSVersion.TLSv1_3
        context.minimum_version = oldest
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
        context.load_cert_chain(certificate, key)
        if not strangers:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(ca[0])
        return context

    def _fresh(self) -> tuple[_Pair, int]:
        with self._lock:
            try:
                seen = self._look()
                if seen not in (self._pair.seen, self._refused):
                    self._refused = seen
                    self._pair = self._read()
                    self._version += 1
                    self._trouble = ""
                    logger.info("%s: a new certificate is in use", self._files[0])
            except (OSError, ValueError) as error:
                if str(error) != self._trouble:  # there may be a handshake every second
                    logger.warning("the certificate before stays in use: %s", error)
                self._trouble = str(error)
            return self._pair, self._version

    def _look(self) -> tuple[tuple[int, int, int], ...]:
        stats = [os.stat(file) for file in self._files]
        return tuple((stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in stats)

    def _read(self) -> _Pair:
        """Raises ValueError, also when the files change meanwhile."""
        try:
            seen = self._look()
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._files[0], self._files[1])
            certificate, key, *ca = (file.read_bytes() for file in self._files)
            for file in self._files[2:]:
                context.load_verify_locations(file)
            if self._look() != seen:
                raise ValueError("the files are being replaced")
        except OSError as error:  # ssl's errors are among them
            names = ", ".join(str(file) for file in self._files)
            reason = error.strerror or str(error)
            raise ValueError(f"{names} are no certificate, its key and a CA: {reason}") from None
        return _Pair(certificate, key, b"".join(ca), seen)


def peer_tls(config: TlsConfig) -> PeerTls | None:
    """What the settings ask for; None: plain connections. Raises ValueError."""
    files = (config.tls_cert_file, config.tls_key_file, config.tls_ca_file)
    if not any(files):
        return None
    if not (all(files) and config.tls_peer_name):
        names = "--tls-cert-file, --tls-key-file, --tls-ca-file and --tls-peer-name"
        raise ValueError(f"{names} go together")
    return PeerTls(config)
