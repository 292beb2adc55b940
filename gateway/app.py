"""Starts the gateway: one event loop with the fleet, the REST face and the gRPC face.

Life: build -> listen -> ready line -> SIGTERM -> /ready 503 and no new requests -> drain -> stop.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import uvicorn
import uvloop

from chiasm import handshake
from chiasm.allocator import keep_freed_memory
from chiasm.checkpoint import no_tensor, resolve_model
from chiasm.collector import keep_loaded_objects
from chiasm.config import GatewayConfig
from chiasm.digest import processor_digest, tokenizer_digest
from chiasm.errors import Unavailable
from chiasm.metrics_port import serve_metrics
from chiasm.server import Server, until_signal
from chiasm.telemetry import GatewayMetrics
from chiasm.tls import PeerTls, peer_tls
from chiasm.v1 import gateway_pb2_grpc
from gateway.admission import Admission
from gateway.api.budget import ByteBudget
from gateway.api.drain import Gate
from gateway.api.face import Face
from gateway.api.keys import ApiKeys
from gateway.api.metrics_page import page_of
from gateway.api.protocol import BoundedProtocol
from gateway.api.rest import build_app
from gateway.api.servicer import GatewayServicer, KeyInterceptor
from gateway.discovery import Fleet, discovery_for
from gateway.door import Door, door_of
from gateway.media import Intake
from gateway.pipeline import Pipeline
from gateway.planning import planner_for
from gateway.prompt import PromptBuilder
from gateway.tenants import Tenants
from gateway.workers import LOOPBACK, serve_workers

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_SILENCE_S = 75  # of a connection before its next request
_GARBAGE_OBJECTS = 20_000  # more than several requests make
_CUT_OFF_S = 2.0  # for cut-off requests to say so
_PLAIN = Door()


def main(config: GatewayConfig) -> None:
    """Serves until SIGTERM or SIGINT, then drains and returns.

    Raises:
        ValueError: Settings or checkpoint files that cannot be.
        Unavailable: A port is in use.
    """
    keep_freed_memory()
    several = config.workers > 1 and not config.parent_metrics
    with asyncio.Runner(loop_factory=None if several else uvloop.new_event_loop) as runner:
        runner.run(serve_workers(config) if several else serve(config))


async def serve(config: GatewayConfig) -> None:
    """`main` inside a running loop."""
    async with running(config) as gateway:
        keep_loaded_objects()
        gc.set_threshold(_GARBAGE_OBJECTS, 20, 20)
        gateway.announce()
        await until_signal(gateway.refuse)
        logger.info("draining for at most %.0f s", config.server.drain_s)
        await gateway.gate.drain(config.server.drain_s)


class Gateway:
    """The two listening faces of one gateway."""

    def __init__(self, face: Face, config: GatewayConfig, door: Door = _PLAIN) -> None:
        server = config.server
        self.gate = Gate()
        self._host = server.host
        self.metrics_port = -1
        self._shared = bool(config.parent_metrics)
        self._socket = _listen(server.host, server.port, shared=self._shared)
        self._grpc = Server(
            server.host,
            config.grpc_port,
            drain_s=_CUT_OFF_S,
            interceptors=(KeyInterceptor(face),),
            tls=door.tls,
            strangers=door.strangers,
            shared=self._shared,
        )
        gateway_pb2_grpc.add_GatewayServicer_to_server(
            GatewayServicer(face, self.gate), self._grpc.grpc
        )
        self._rest = _Uvicorn(_uvicorn_config(build_app(face, self.gate), door.context()))
        self._task: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """host:port of the REST face."""
        return f"{self._host}:{self._socket.getsockname()[1]}"

    @property
    def grpc_address(self) -> str:
        """host:port of the gRPC face."""
        return self._grpc.address

    async def start(self) -> None:
        """Both faces answer when this returns."""
        await self._grpc.start(("chiasm.v1.Gateway",))
        await self._grpc.ready(True)
        self._task = asyncio.create_task(self._rest.serve(sockets=[self._socket]))
        while not self._rest.started and not self._task.done():
            await asyncio.sleep(0.01)

    def announce(self) -> None:
        """The one line that tools wait for."""
        line = f"chiasm-ready role=gateway address={self.address} grpc={self.grpc_address}"
        if self._shared:
            line += f" metrics={LOOPBACK}:{self.metrics_port}"
        print(line, flush=True)

    def refuse(self) -> None:
        """From now on /ready says 503 and new requests are refused."""
        self.gate.draining = True

    async def stop(self) -> None:
        """Closes both faces; requests that are still inside have been cut off before."""
        self.refuse()
        self._rest.should_exit = True
        await self._grpc.stop()
        if self._task is not None:
            await self._task
        self._socket.close()


@asynccontextmanager
async def running(config: GatewayConfig) -> AsyncIterator[Gateway]:
    """A gateway that serves inside the block. Peers may come later."""
    model_dir = resolve_model(config.model, wanted=no_tensor)
    keys = ApiKeys.from_file(config.api_key_file)
    metrics = GatewayMetrics()
    planner = planner_for(model_dir)
    prompts = PromptBuilder(model_dir)
    processor = processor_digest(model_dir)
    expected = handshake.Expected(planner.family, processor, tokenizer_digest(model_dir))
    tls = peer_tls(config.server.tls)
    fleet = Fleet(discovery_for(config), expected, tls)
    intake = Intake(config.media)
    tenants = Tenants(keys.limits_of, share=1 / config.workers)
    pipeline = Pipeline(
        config,
        fleet=fleet,
        intake=intake,
        planner=planner,
        prompts=prompts,
        processor=processor,
        admission=Admission(config, metrics=metrics, tenants=tenants),
    )
    face = Face(
        pipeline=pipeline,
        prompts=prompts,
        keys=keys,
        tenants=tenants,
        metrics=metrics,
        max_body_bytes=config.admission.max_body_bytes,
        bodies=ByteBudget(config.media.max_bytes_in_flight),
        metrics_page=page_of(metrics, config.parent_metrics),
    )
    gateway = Gateway(face, config, door_of(config, tls))
    loop = asyncio.get_running_loop()
    metrics.tasks.set_function(lambda: len(asyncio.all_tasks(loop)))
    gateway.metrics_port = _serve_metrics(metrics, config, tls)
    fleet.start()
    try:
        await gateway.start()
        yield gateway
    finally:
        await gateway.stop()
        await fleet.close()
        await intake.close()


def _serve_metrics(metrics: GatewayMetrics, config: GatewayConfig, tls: PeerTls | None) -> int:
    """The port; of a worker one for its parent alone."""
    if config.parent_metrics:
        return serve_metrics(metrics.registry, LOOPBACK, 0, None)
    return serve_metrics(metrics.registry, config.server.host, config.server.metrics_port, tls)


class _Uvicorn(uvicorn.Server):
    """Leaves signals to us."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn_config(app: object, context: ssl.SSLContext | None) -> uvicorn.Config:
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=BoundedProtocol,
        lifespan="off",
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing here asks for the client's address
        timeout_keep_alive=_SILENCE_S,
        timeout_graceful_shutdown=int(_CUT_OFF_S),
    )
    config.load()
    config.ssl = context  # ours reads its files again; uvicorn's own would not
    return config


def _listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    with suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise Unavailable(f"cannot listen on {host}:{port}: is the port in use?") from error
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener
