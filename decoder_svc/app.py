"""The decoder as a process: load, serve, watch the engine, drain on SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import chiasm
from chiasm import bundles
from chiasm.checkpoint import resolve_model
from chiasm.collector import keep_loaded_objects
from chiasm.config import DecoderConfig
from chiasm.digest import language_model_digest, tokenizer_digest, tower_digest
from chiasm.errors import Internal
from chiasm.handshake import CONTRACT
from chiasm.metrics_port import serve_metrics
from chiasm.server import Server, until_signal
from chiasm.telemetry import DecoderMetrics
from chiasm.tls import PeerTls, peer_tls
from chiasm.v1 import common_pb2, decoder_pb2_grpc
from decoder_svc.admission import room_of
from decoder_svc.assembly import Parts, build_engine, load_parts, warm_up
from decoder_svc.config.from_hf import TextConfig, read_text_config
from decoder_svc.embeddings.fetcher import Fetcher
from decoder_svc.embeddings.inbound import Inbound
from decoder_svc.engine.client import EngineClient
from decoder_svc.engine.core import EngineCore
from decoder_svc.grammar_check import GrammarCheck
from decoder_svc.intake import Intake
from decoder_svc.parallel.launch import rendezvous_of
from decoder_svc.runner.node import lend_ranks
from decoder_svc.servicer import SERVICE_NAME, DecoderServicer

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 60.0
_WATCH_S = 1.0
_POLL_S = 0.05
_LAST_STREAMS_S = 0.5  # for what is left after the drain: WatchLoad streams, which never end


Load = Callable[[DecoderConfig, TextConfig, Path], Parts]


Running = tuple[EngineCore, threading.Thread]
"""An engine, and the thread that runs it."""


def main(config: DecoderConfig, load: Load = load_parts) -> None:
    """Serves until SIGTERM, then drains and returns; on further hosts, lends ranks to the first.

    Args:
        config: Settings.
        load: Makes the parts, in a thread.

    Raises:
        ValueError: Settings or a checkpoint that cannot be served.
        ChiasmError: The port is taken, or the engine died.
    """
    rendezvous = rendezvous_of(os.environ)
    if rendezvous.node_rank:
        lend_ranks(config, rendezvous)
    else:
        asyncio.run(_serve(config, load))


async def _serve(config: DecoderConfig, load: Load) -> None:
    tls = peer_tls(config.server.tls)
    server = listen(config, tls)
    model_dir = resolve_model(config.model)
    text = read_text_config(model_dir)
    parts = await asyncio.to_thread(load, config, text, model_dir)
    try:
        await asyncio.to_thread(
            warm_up,
            parts.executor,
            num_blocks=parts.num_blocks,
            block_size=config.memory.block_size,
        )
        keep_loaded_objects()
        async with running(config, text, parts, model_dir, server, tls) as (core, thread):
            print(f"chiasm-ready role=decoder address={server.address}", flush=True)
            await _until_over(server, core, thread)
    finally:
        parts.executor.close()
        parts.slab.close()


def listen(config: DecoderConfig, tls: PeerTls | None = None) -> Server:
    """The port, bound; nobody answers there yet. Raises Unavailable."""
    return Server(config.server.host, config.server.port, drain_s=_LAST_STREAMS_S, tls=tls)


@asynccontextmanager
async def running(
    config: DecoderConfig,
    text: TextConfig,
    parts: Parts,
    model_dir: Path,
    server: Server,
    tls: PeerTls | None = None,
) -> AsyncIterator[Running]:
    """A decoder that serves inside the block, and drains at its end; the parts outlive it.

    Args:
        config: Settings.
        text: Of the checkpoint.
        parts: Loaded; no other engine runs over them.
        model_dir: The checkpoint, for its digests.
        server: Where to serve.
        tls: What encoders are dialled with.
    """
    description = await asyncio.to_thread(describe, config, text, parts, model_dir, server.port)
    metrics = DecoderMetrics()
    inbound = Inbound(parts.slab, metrics)
    await inbound.offer(config.transport, parts.bank)
    description.transports[:] = inbound.transports
    try:
        wire = _Wire(description, server, inbound, metrics, tls)
        async with _over(config, text, parts, wire) as decoder:
            yield decoder
    finally:
        await inbound.close()


@dataclass(frozen=True, slots=True)
class _Wire:
    """What the world sees of the engine."""

    description: common_pb2.Description
    server: Server
    inbound: Inbound
    metrics: DecoderMetrics
    tls: PeerTls | None


@asynccontextmanager
async def _over(
    config: DecoderConfig, text: TextConfig, parts: Parts, wire: _Wire
) -> AsyncIterator[Running]:
    server, metrics = wire.server, wire.metrics
    client = client_of(config, parts, metrics)
    fetcher = Fetcher(
        row_format=parts.rows,
        open_receiver=wire.inbound.open,
        post=client.mailbox.put,
        on_dropped=metrics.fetch_dropped_chunks.inc,
        tls=wire.tls,
    )
    client.on_commands = fetcher.execute
    metrics.slab_pages_held.set_function(lambda: parts.slab_pages - client.load.slab_pages_free)
    core = build_engine(config, parts, client.mailbox, metrics)
    grammars = GrammarCheck(parts.grammars)
    servicer = DecoderServicer(
        grammars=grammars,
        intake=Intake(
            text,
            max_model_len=parts.max_model_len,
            max_choices=config.scheduler.max_running_requests,
        ),
        client=client,
        description=wire.description,
        slab_page_bytes=parts.rows.row_bytes * config.memory.slab_page_rows,
        slab_pages=parts.slab_pages,
    )
    decoder_pb2_grpc.add_DecoderServicer_to_server(servicer, server.grpc)
    thread = threading.Thread(target=core.run, name="engine", daemon=True)
    thread.start()
    grammars.start()
    await server.start((SERVICE_NAME,))
    serve_metrics(metrics.registry, config.server.host, config.server.metrics_port, wire.tls)
    await server.ready(True)
    try:
        yield core, thread
    finally:
        client.draining = True
        await server.ready(False)
        await _drain(client, thread, config.server.drain_s)
        await server.stop()
        core.stop()
        await asyncio.to_thread(thread.join)
        await fetcher.close()
        await grammars.close()


def client_of(config: DecoderConfig, parts: Parts, metrics: DecoderMetrics) -> EngineClient:
    """The event loop's end of the engine, with room for what the config lets wait."""
    return EngineClient(
        max_waiting=config.scheduler.max_waiting_requests,
        room=room_of(
            config.scheduler,
            config.memory,
            pages=parts.num_blocks,
            row_bytes=parts.rows.row_bytes,
        ),
        metrics=metrics,
    )


async def _until_over(server: Server, core: EngineCore, thread: threading.Thread) -> None:
    """Returns on a signal. Raises Internal when the engine's thread has ended by itself."""
    signalled = asyncio.create_task(until_signal())
    healthy = alive = True
    while True:
        await asyncio.wait((signalled,), timeout=_WATCH_S)
        if signalled.done():
            return
        if not thread.is_alive():
            signalled.cancel()
            raise Internal("the engine has died")
        beating = time.monotonic() - core.heartbeat < _HEARTBEAT_S
        if (beating and core.available) is not healthy:
            healthy = not healthy
            reason = "has lost its ranks" if beating else "has stopped beating"
            logger.error("engine %s", "is well again" if healthy else reason)
            await server.ready(healthy)
        if beating is not alive:
            alive = beating
            await server.live(alive)


async def _drain(client: EngineClient, engine: threading.Thread, drain_s: float) -> None:
    """Waits until no request is open, the time is up, or nobody is there to finish any."""
    deadline = time.monotonic() + drain_s
    while client.num_open and engine.is_alive() and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)
    if client.num_open:
        logger.warning("%d requests are cut off", client.num_open)


def describe(
    config: DecoderConfig, text: TextConfig, parts: Parts, model_dir: Path, port: int
) -> common_pb2.Description:
    """What Describe says: reads the checkpoint for its digests."""
    full = config.digest == "full"
    host = config.server.advertise_host or config.server.host
    epoch = time.time_ns()
    return common_pb2.Description(
        contract=CONTRACT,
        features=features_of(parts),
        role="decoder",
        instance_id=f"decoder-{epoch:x}",
        epoch=epoch,
        advertised_address=f"{host}:{port}",
        model=config.model,
        family=text.family,
        digests=common_pb2.Digests(
            tower=tower_digest(model_dir, full=full),
            tokenizer=tokenizer_digest(model_dir),
            language_model=language_model_digest(model_dir, full=full),
        ),
        rows=parts.rows.to_proto(),
        max_model_len=parts.max_model_len,
        vocab_size=text.vocab_size,
        version=chiasm.__version__,
    )


def features_of(parts: Parts) -> tuple[str, ...]:
    """What a gateway may ask for."""
    always = ("n", "penalties", "logprobs", "logit_bias", "resume", "hedge", bundles.FEATURE)
    return (*always, "grammar") if parts.grammars.available else always
