"""Mutual TLS between services: the certificate a process shows, and the CA it knows peers by.

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
        config: Names of all three files.

    Raises:
        ValueError: A file cannot be read, or key and certificate do not belong together.
    """

    def __init__(self, config: TlsConfig) -> None:
        self._files = tuple(
            Path(file) for file in (config.tls_cert_file, config.tls_key_file, config.tls_ca_file)
        )
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

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a port that only peers get through; always of the newest files."""
        return grpc.dynamic_ssl_server_credentials(
            self._server_configuration(),
            self._server_configuration,
            require_client_authentication=True,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a channel to a peer; of the files as they are now, so look at `version`."""
        pair, _ = self._fresh()
        return grpc.ssl_channel_credentials(pair.ca, pair.key, pair.certificate)

    def context(self) -> ssl.SSLContext:
        """For one connection to a port of ours that is not gRPC's."""
        self._fresh()
        certificate, key, ca = self._files
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(ca))
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(certificate, key)
        return context

    def _server_configuration(self) -> grpc.ServerCertificateConfiguration:
        pair, _ = self._fresh()
        return grpc.ssl_server_certificate_configuration([(pair.key, pair.certificate)], pair.ca)

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
            context = ssl.create_default_context(cafile=str(self._files[2]))
            context.load_cert_chain(self._files[0], self._files[1])
            certificate, key, ca = (file.read_bytes() for file in self._files)
            if self._look() != seen:
                raise ValueError("the files are being replaced")
        except OSError as error:  # ssl's errors are among them
            names = ", ".join(str(file) for file in self._files)
            reason = error.strerror or str(error)
            raise ValueError(f"{names} are no certificate, its key and a CA: {reason}") from None
        return _Pair(certificate, key, ca, seen)


def peer_tls(config: TlsConfig) -> PeerTls | None:
    """What the settings ask for; None: plain connections. Raises ValueError."""
    files = (config.tls_cert_file, config.tls_key_file, config.tls_ca_file)
    if not any(files):
        return None
    if not (all(files) and config.tls_peer_name):
        names = "--tls-cert-file, --tls-key-file, --tls-ca-file and --tls-peer-name"
        raise ValueError(f"{names} go together")
    return PeerTls(config)
