"""Several workers, one process each, behind one port that lists them. No torch, no weights here.

A worker that dies is started again where it listened, as a new epoch; meanwhile it is not listed.
The kernel kills the workers when this process dies, however that happens (`chiasm.process`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace

from chiasm.channel import connect, messages, typed_errors
from chiasm.config import EncoderConfig
from chiasm.config.load import to_flags
from chiasm.errors import ChiasmError, Unavailable
from chiasm.process import READY_PREFIX, SUPERVISOR, DidNotStart, Spec, Supervisor
from chiasm.server import Server, advertised_address, until_signal
from chiasm.tls import PeerTls, peer_tls
from chiasm.v1 import common_pb2, encoder_pb2, encoder_pb2_grpc
from encoder_svc.replica_servicer import ReplicaServicer
from encoder_svc.roster import Roster

logger = logging.getLogger(__name__)

SERVICE_NAME = encoder_pb2.DESCRIPTOR.services_by_name["Encoder"].full_name

_DESCRIBE_S = 5.0
_LOAD_INTERVAL_MS = 250
_RETRY_S = 0.5
_LAST_STREAMS_S = 0.5
_BEYOND_DRAIN_S = 5.0  # for a worker to end by itself before it is killed


def serve_replicas(config: EncoderConfig) -> None:
    """Serves until SIGTERM, then drains all workers and returns.

    Raises:
        ChiasmError: The port is taken, or a worker does not start.
    """
    asyncio.run(_serve(config))


async def _serve(config: EncoderConfig) -> None:
    tls = peer_tls(config.server.tls)
    server = Server(
        config.server.host,
        config.server.port,
        drain_s=_LAST_STREAMS_S,
        tls=tls,
    )
    epoch = time.time_ns()
    roster = Roster(
        common_pb2.Description(
            instance_id=f"encoder-{epoch:x}",
            epoch=epoch,
            advertised_address=advertised_address(config.server, server.port),
        )
    )
    encoder_pb2_grpc.add_EncoderServicer_to_server(ReplicaServicer(roster), server.grpc)
    await server.start((SERVICE_NAME,))
    replicas = Replicas(config, roster, tls)
    health = asyncio.create_task(_tell_health(server, roster))
    try:
        await replicas.start()
        print(f"{READY_PREFIX}role=encoder address={server.address}", flush=True)
        await until_signal()
    finally:
        health.cancel()
        await server.ready(False)
        await replicas.stop()
        await server.stop()


async def _tell_health(server: Server, roster: Roster) -> None:
    while True:
        version = roster.version
        await server.ready(roster.num_live > 0)
        await roster.changed(version)


class Replicas:
    """Owns the worker processes and keeps the roster true.

    Args:
        config: Of the whole replica.
        roster: Told of workers.
        tls: What they are dialled with.
    """

    def __init__(self, config: EncoderConfig, roster: Roster, tls: PeerTls | None = None) -> None:
        self._tls = tls
        self._config = config
        self._roster = roster
        self._links: dict[str, asyncio.Task[None]] = {}
        self._supervisor = Supervisor(
            _relay, stop_s=config.server.drain_s + _BEYOND_DRAIN_S, watch=self._watch
        )

    async def start(self) -> None:
        """Starts every worker and waits until all are listed.

        Raises:
            Unavailable: One ended before it was ready; `stop` ends the others.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(self._config.dp_size):
                    group.create_task(self._supervisor.launch(worker_spec(self._config, index)))
        except* DidNotStart as failures:
            raise Unavailable(str(failures.exceptions[0])) from failures
        while self._roster.num_live < self._config.dp_size:
            await self._roster.changed(self._roster.version)

    async def stop(self) -> None:
        """Drains and ends every worker. Each is listed until it is gone."""
        self._roster.draining = True
        for link in self._links.values():
            link.cancel()  # a stream of ours would hold up the worker's end
        await self._supervisor.stop()

    def _watch(self, name: str, ready: Mapping[str, str] | None) -> None:
        """A worker has become ready, or has ended."""
        link = self._links.pop(name, None)
        if link is not None:
            link.cancel()
        self._roster.leave(name)
        if ready is not None:
            follow = self._follow(name, ready["address"])
            self._links[name] = asyncio.create_task(follow, name=f"follow {name}")

    async def _follow(self, name: str, address: str) -> None:
        """Keeps one worker on the roster for as long as it answers."""
        while True:
            # Made anew each time: the certificate may be another by now.
            async with connect(address, self._tls) as channel:
                stub = encoder_pb2_grpc.EncoderStub(channel)
                try:
                    request = common_pb2.DescribeRequest()
                    with typed_errors():
                        description = await stub.Describe(request, timeout=_DESCRIBE_S)
                    self._roster.join(name, description)
                    interval = common_pb2.WatchLoadRequest(interval_ms=_LOAD_INTERVAL_MS)
                    async for load in messages(stub.WatchLoad(interval)):
                        self._roster.advise(name, load)
                except ChiasmError as error:
                    logger.info("%s does not answer: %s", name, error.message)
            self._roster.leave(name)
            await asyncio.sleep(_RETRY_S)


def worker_spec(config: EncoderConfig, index: int) -> Spec:
    """How worker `index` is started: the replica's settings, with a device and ports of its own.

    Metrics ports follow the replica's: worker i serves `--metrics-port` + i.
    """
    metrics_port = config.server.metrics_port
    worker = replace(
        config,
        dp_size=1,
        device=config.device if config.device == "cpu" else f"{config.device}:{index}",
        num_threads=config.num_threads or max(1, (os.cpu_count() or 1) // config.dp_size),
        server=replace(
            config.server,
            port=0,
            metrics_port=metrics_port + index if metrics_port > 0 else metrics_port,
        ),
    )
    flags = [flag for flag in to_flags(worker) if not flag.startswith("--port=")]
    command = (sys.executable, "-m", "encoder_svc", *flags, "--port", "0")
    return Spec(f"worker-{index}", command, pinned={"address": "--port"})


def _relay(name: str, line: str) -> None:
    """Workers' logs are ours; their ready lines are not."""
    if name == SUPERVISOR:
        logger.warning("%s", line)
    elif not line.startswith(READY_PREFIX):
        print(f"{name}: {line}", file=sys.stderr, flush=True)
