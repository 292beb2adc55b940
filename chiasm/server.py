"""A gRPC server with health, reflection, limits and an orderly end. All three services use it.

Life: bind -> not serving -> ready(True) -> SIGTERM -> not serving -> drain -> stop.
Health under the name `live` is for whoever restarts processes: who loads or drains is alive.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from chiasm.config import ServerConfig
from chiasm.errors import Unavailable
from chiasm.interceptors import ErrorInterceptor
from chiasm.probe import LIVE
from chiasm.tls import PeerTls
from chiasm.v1 import common_pb2

logger = logging.getLogger(__name__)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # A megabyte in a frame and on its way, not 16 kB: fewer wake-ups on both ends.
    ("grpc.http2.max_frame_size", 1 << 20),
    ("grpc.http2.lookahead_bytes", 4 << 20),
    # Clients may ping every 10 s, also without calls: silent prefills are not punished.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # its own limit, else a minute, comes first
    ("grpc.so_reuseport", 0),
)


class Server:
    """Owns one grpc.aio server.

    Args:
        host: Address to bind.
        port: Port to bind; 0 takes a free one.
        drain_s: Seconds that open rpcs get after `stop`.
        interceptors: Further ones, inside the one that turns errors into statuses.
        tls: Only peers get through; None: everybody does, in plain text.
        strangers: With `tls`, who shows no certificate gets through as well.
        shared: Other processes listen on the same port.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        drain_s: float = 30.0,
        interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
        tls: PeerTls | None = None,
        strangers: bool = False,
        shared: bool = False,
    ) -> None:
        options = {**dict(SERVER_OPTIONS), "grpc.so_reuseport": int(shared)}
        self.grpc = grpc.aio.server(
            interceptors=(ErrorInterceptor(), *interceptors), options=tuple(options.items())
        )
        self._host = host
        self._drain_s = drain_s
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._names: tuple[str, ...] = ()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        credentials = tls.server_credentials(strangers=strangers) if tls else None
        self.port = _listen(self.grpc, host, port, credentials)

    @property
    def address(self) -> str:
        """host:port as bound."""
        return f"{self._host}:{self.port}"

    async def start(self, service_names: Sequence[str]) -> None:
        """Starts serving; health says NOT_SERVING until `ready(True)`."""
        self._names = (*service_names, "")
        reflection.enable_server_reflection(
            (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), self.grpc
        )
        await self.ready(False)
        await self.live(True)
        await self.grpc.start()

    async def ready(self, ready: bool) -> None:
        """Sets health for every service and for the server as a whole."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        for name in self._names:
            await self._health.set(name, status.SERVING if ready else status.NOT_SERVING)

    async def live(self, live: bool) -> None:
        """Sets health of `live`: false only for what a new process heals and waiting does not."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        await self._health.set(LIVE, status.SERVING if live else status.NOT_SERVING)

    async def stop(self) -> None:
        """Not ready, then drain, then cancel what is left."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(self._drain_s)


def _listen(
    server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None
) -> int:
    """The port bound. Raises Unavailable."""
    address = f"{host}:{port}"
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise Unavailable(f"cannot listen on {address}: is the port in use?") from error


def advertised_address(config: ServerConfig, port: int) -> str:
    """host:port that peers should dial.

    A wildcard cannot be dialled: this machine's own address stands in for it.
    """
    host = config.advertise_host or config.host
    if host in ("0.0.0.0", "::"):
        host = socket.gethostbyname(socket.gethostname())
    return f"{host}:{port}"


def load_interval_s(request: common_pb2.WatchLoadRequest) -> float:
    """The pause between two lines of WatchLoad, kept within what a service bears."""
    asked_ms: int = request.interval_ms or 500
    return min(max(asked_ms, 100), 10_000) / 1000


async def until_signal(on_first: Callable[[], None] | None = None) -> None:
    """Returns on the first SIGTERM or SIGINT; a second one kills the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def received(number: int) -> None:
        if stop.is_set():
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if on_first is not None:
            on_first()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received, number)
    await stop.wait()
