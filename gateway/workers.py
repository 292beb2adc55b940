"""Several gateway processes behind one address: `--workers N`.

Each worker is a whole gateway. They listen on the same ports (SO_REUSEPORT: the kernel spreads new
connections), which this process holds without listening, so that nobody else gets them between two
lives of a worker. It starts again what dies, ends all in order, and sums their metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

import aiohttp
from aiohttp import web

from chiasm.config import GatewayConfig
from chiasm.config.load import to_flags
from chiasm.errors import Unavailable
from chiasm.process import DidNotStart, Spec, Supervisor
from chiasm.server import until_signal
from chiasm.tls import peer_tls
from gateway.totals import Totals

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_LOOK_S = 5.0  # between looks at the workers' metrics
_ANSWER_S = 2.0


async def serve_workers(config: GatewayConfig) -> None:
    """Serves until SIGTERM or SIGINT, then drains and returns.

    Raises:
        ValueError: Settings that several workers cannot have.
        Unavailable: A port is in use, or a worker does not start.
    """
    with contextlib.ExitStack() as held:
        rest, grpc = (
            _reserve(held, config.server.host, port)
            for port in (config.server.port, config.grpc_port)
        )
        async with _metrics(config) as metrics:
            child = replace(
                _share(config),
                server=replace(config.server, port=rest),
                grpc_port=grpc,
                parent_metrics=metrics.address,
            )
            supervisor = Supervisor(_relay, stop_s=config.server.drain_s + 5.0, watch=metrics.watch)
            try:
                await _launch(supervisor, child)
                host = config.server.host
                line = f"address={host}:{rest} grpc={host}:{grpc} workers={config.workers}"
                print(f"chiasm-ready role=gateway {line}", flush=True)
                await until_signal()
            finally:
                await supervisor.stop()


def _share(config: GatewayConfig) -> GatewayConfig:
    """Each worker's part of the limits on all requests together."""
    admission, media, workers = config.admission, config.media, config.workers
    return replace(
        config,
        admission=replace(
            admission,
            max_inflight=-(-admission.max_inflight // workers),
            max_queued=-(-admission.max_queued // workers),
        ),
        media=replace(media, max_bytes_in_flight=media.max_bytes_in_flight // workers),
    )


async def _launch(supervisor: Supervisor, child: GatewayConfig) -> None:
    command = (sys.executable, "-m", "gateway", *to_flags(child))
    specs = [Spec(f"gateway-{number}", command) for number in range(child.workers)]
    try:
        await asyncio.gather(*(supervisor.launch(spec) for spec in specs))
    except DidNotStart as error:
        raise Unavailable(str(error)) from None


class _Metrics:
    """Sums the metrics of the workers there are."""

    def __init__(self) -> None:
        self.address = ""
        self._totals = Totals()
        self._urls: dict[str, str] = {}
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ANSWER_S))

    def watch(self, worker: str, ready: Mapping[str, str] | None) -> None:
        """From the supervisor: a worker is ready, or has ended."""
        if ready is not None:
            self._urls[worker] = f"http://{ready['metrics']}/metrics"
        else:
            self._urls.pop(worker, None)
            self._totals.gone(worker)

    async def page(self, request: web.Request) -> web.Response:
        """The sums, as they are now."""
        await self._look()
        return web.Response(text=self._totals.page(), content_type="text/plain")

    async def look_on(self) -> None:
        """For ever: so that little is lost of what a worker counts that dies."""
        while True:
            await self._look()
            await asyncio.sleep(_LOOK_S)

    async def close(self) -> None:
        """Ends the session."""
        await self._session.close()

    async def _look(self) -> None:
        await asyncio.gather(*(self._ask(*pair) for pair in tuple(self._urls.items())))

    async def _ask(self, worker: str, url: str) -> None:
        try:
            async with self._session.get(url) as answer:
                page = await answer.text()
        except (aiohttp.ClientError, TimeoutError):
            return  # what it said last counts
        if self._urls.get(worker) == url:
            self._totals.update(worker, page)


@contextlib.asynccontextmanager
async def _metrics(config: GatewayConfig) -> AsyncIterator[_Metrics]:
    """Serves the sums on loopback to the workers, and to peers on the port that is asked for."""
    tls = peer_tls(config.server.tls)
    metrics = _Metrics()
    app = web.Application()
    app.router.add_get("/metrics", metrics.page)
    runner = web.AppRunner(app)
    await runner.setup()
    looking = asyncio.create_task(metrics.look_on())
    host, port = config.server.host, config.server.metrics_port
    try:
        await web.TCPSite(runner, LOOPBACK, 0).start()
        metrics.address = f"{LOOPBACK}:{runner.addresses[0][1]}"
        if port >= 0:
            context = tls.context() if tls else None
            await web.TCPSite(runner, host, port, ssl_context=context).start()
        yield metrics
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        await runner.cleanup()
        await metrics.close()


def _reserve(held: contextlib.ExitStack, host: str, port: int) -> int:
    """Binds without listening, so that the port is ours and connections go to the workers."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    holder = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind((host, port))  # alone: who listens there already makes this fail
    except OSError as error:
        raise Unavailable(f"cannot listen on {host}:{port}: is the port in use?") from error
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return int(holder.getsockname()[1])


def _relay(name: str, line: str) -> None:
    print(f"{name} | {line}", flush=True)
