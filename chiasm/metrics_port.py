"""The port that Prometheus reads, with mutual TLS where peers have it."""

from __future__ import annotations

import logging
import socket
import threading
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from chiasm.errors import Unavailable
from chiasm.tls import PeerTls

logger = logging.getLogger(__name__)

_PATIENCE_S = 30.0


def serve_metrics(
    registry: CollectorRegistry, host: str, port: int, tls: PeerTls | None = None
) -> int:
    """Serves `/metrics` from a thread; returns the port. A negative port serves nothing.

    Raises:
        Unavailable: The port is taken.
    """
    if port < 0:
        return -1
    try:
        server = _Server(host, port, tls)
    except OSError as error:
        raise Unavailable(f"cannot listen on {host}:{port}: is the port in use?") from error
    server.set_app(make_wsgi_app(registry))
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return int(server.server_port)


class _Server(ThreadingWSGIServer):
    """Shakes hands in the connection's own thread: one who is silent holds up no other."""

    def __init__(self, host: str, port: int, tls: PeerTls | None) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._context = tls.context() if tls else None
        super().__init__((host, port), _Quiet)

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(_PATIENCE_S)
        if self._context is None:
            super().finish_request(request, client_address)
            return
        with self._context.wrap_socket(request, server_side=True) as secured:
            super().finish_request(secured, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("metrics: %s", client_address, exc_info=True)


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Nobody wants a line for each scrape."""
