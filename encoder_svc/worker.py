"""One encoder worker: load, warm up, serve, drain on SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

import chiasm
from chiasm import bundles
from chiasm.allocator import keep_freed_memory
from chiasm.checkpoint import resolve_model
from chiasm.collector import keep_loaded_objects
from chiasm.config import EncoderConfig
from chiasm.digest import is_tower_tensor, processor_digest, tower_digest
from chiasm.handshake import CONTRACT
from chiasm.metrics_port import serve_metrics
from chiasm.server import Server, advertised_address, until_signal
from chiasm.telemetry import EncoderMetrics
from chiasm.tls import PeerTls, peer_tls
from chiasm.v1 import common_pb2, encoder_pb2, encoder_pb2_grpc
from encoder_svc.engine import EncoderEngine, EngineLimits
from encoder_svc.metered_sink import MeteredSink
from encoder_svc.pinned import PinnedLevel
from encoder_svc.pixels.device import DevicePatchifier
from encoder_svc.pixels.patches import Patchifier
from encoder_svc.pixels.settings import read_settings
from encoder_svc.processor import Processor
from encoder_svc.runner import TowerRunner
from encoder_svc.second_level import SecondLevel
from encoder_svc.servicer import EncoderServicer
from encoder_svc.transfer import RowTransfer, open_transfer
from encoder_svc.work import PreparedUnit, Preprocessor, RunFailure, Runner

logger = logging.getLogger(__name__)

SERVICE_NAME = encoder_pb2.DESCRIPTOR.services_by_name["Encoder"].full_name

_POLL_S = 0.05
_WARM_CELLS = 18  # along a side: 1296 patches where 2 x 2 make a cell, whole windows and cut ones
_LAST_STREAMS_S = 0.5  # for what is left after the drain: WatchLoad streams, which never end


@dataclass(frozen=True, slots=True)
class Parts:
    """What is loaded before anything is served."""

    runner: Runner
    processor: Preprocessor
    tower_digest: bytes
    processor_digest: bytes
    transfer: RowTransfer | None = None
    second: SecondLevel | None = None


def serve_worker(
    config: EncoderConfig, load: Callable[[EncoderConfig], Parts] | None = None
) -> None:
    """Serves until SIGTERM, then drains and returns.

    Args:
        config: Settings; `dp_size` is not looked at.
        load: Makes the parts, in a thread; `load_parts` unless another is given.

    Raises:
        ValueError: Settings or a checkpoint that cannot be served.
        ChiasmError: The port is taken.
    """
    keep_freed_memory()
    asyncio.run(_serve(config, load or load_parts))


async def _serve(config: EncoderConfig, load: Callable[[EncoderConfig], Parts]) -> None:
    tls = peer_tls(config.server.tls)
    server = listen(config, tls)  # first: a taken port must not cost the loading of a tower
    parts = await asyncio.to_thread(load, config)
    keep_loaded_objects()
    async with running(config, parts, server, tls):
        print(f"chiasm-ready role=encoder address={server.address}", flush=True)
        await until_signal()


def listen(config: EncoderConfig, tls: PeerTls | None = None) -> Server:
    """The port, bound; nobody answers there yet. Raises Unavailable."""
    return Server(config.server.host, config.server.port, drain_s=_LAST_STREAMS_S, tls=tls)


@asynccontextmanager
async def running(
    config: EncoderConfig, parts: Parts, server: Server, tls: PeerTls | None = None
) -> AsyncIterator[None]:
    """A worker that serves inside the block, and drains at its end.

    Args:
        config: Settings; `dp_size` is not looked at.
        parts: Loaded; what they transfer with is closed at the end.
        server: Where to serve.
        tls: What the port of the metrics shows.
    """
    engine = EncoderEngine(parts.runner, parts.processor, _limits(config))
    metrics = EncoderMetrics()
    metrics.pending_patches.set_function(lambda: engine.pending_patches)
    servicer = EncoderServicer(
        engine,
        config=config,
        description=describe(config, parts, server.port),
        metrics=metrics,
        outbound=parts.transfer.outbound if parts.transfer else None,
        second=parts.second,
    )
    metrics.held_bytes.set_function(lambda: servicer.store.held_bytes)
    metrics.open_encodes.set_function(lambda: servicer.store.num_encodes)
    metrics.open_fetches.set_function(lambda: servicer.fetches.num_open)
    engine.start(MeteredSink(servicer.store, metrics))
    encoder_pb2_grpc.add_EncoderServicer_to_server(servicer, server.grpc)
    await server.start((SERVICE_NAME,))
    serve_metrics(metrics.registry, config.server.host, config.server.metrics_port, tls)
    await server.ready(True)
    try:
        yield
    finally:
        servicer.draining = True
        await server.ready(False)
        await _drain(servicer, config.server.drain_s)
        await server.stop()
        await engine.stop()
        if parts.transfer:
            await asyncio.to_thread(parts.transfer.close)


async def _drain(servicer: EncoderServicer, drain_s: float) -> None:
    """Waits until nobody is interested in any rows, or the time is up.

    The server goes on taking Fetches: the rows of an Encode accepted before the signal must be had.
    """
    store = servicer.store
    deadline = time.monotonic() + drain_s
    while store.num_encodes + store.num_fetches and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)
    if store.num_encodes + store.num_fetches:
        logger.warning("draining took over %s s: open streams are cut", drain_s)


def load_parts(config: EncoderConfig) -> Parts:
    """Loads and warms the tower and reads the digests. Blocks. Raises ValueError."""
    if config.shared_gpu:
        # Read when CUDA starts, by MPS alone: 0 is normal, 1 below it.
        os.environ.setdefault("CUDA_MPS_CLIENT_PRIORITY", "1")
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    began = time.monotonic()
    model_dir = resolve_model(config.model, wanted=is_tower_tensor)
    runner = TowerRunner.load(
        model_dir, device=config.device, dtype=config.dtype, row_dtype=config.row_dtype
    )
    make = (
        partial(DevicePatchifier, device=runner.device, dtype=runner.dtype)
        if runner.device.type == "cuda"
        else Patchifier
    )
    transfer = open_transfer(config, runner.device)
    if transfer is not None:
        runner.keep = transfer.arena.keep
    parts = Parts(
        runner=runner,
        processor=Processor(*read_settings(model_dir, runner.geometry), make),
        tower_digest=tower_digest(model_dir, full=config.digest == "full"),
        processor_digest=processor_digest(model_dir),
        transfer=transfer,
        second=_second_level(config, runner),
    )
    warm_up(runner)
    logger.info("%s: vision tower ready in %.1f s", config.model, time.monotonic() - began)
    return parts


def _second_level(config: EncoderConfig, runner: TowerRunner) -> SecondLevel | None:
    """None where rows are in host memory anyway, or none is to be spent on this."""
    if runner.device.type != "cuda" or not config.host_cache_bytes:
        return None
    keeper = PinnedLevel(config.host_cache_bytes, runner.device, runner.keep)
    return SecondLevel(config.host_cache_bytes, keeper)


def warm_up(runner: TowerRunner) -> None:
    """Runs the smallest picture, and on a GPU a larger one, so that the first request finds every
    kernel compiled. Raises ValueError when a blank picture has no finite rows."""
    times = [1, _WARM_CELLS] if runner.device.type == "cuda" else [1]
    for grid in map(runner.geometry.blank, times):
        patches = np.zeros((grid.patches, runner.geometry.patch_values), dtype=np.float32)
        (outcome,) = runner.run([PreparedUnit(patches, grid)], segment_rows=4096)
        if isinstance(outcome, RunFailure):
            raise ValueError(f"{outcome.message}, for a blank picture: is --dtype right?")


def describe(config: EncoderConfig, parts: Parts, port: int) -> common_pb2.Description:
    """What Describe says."""
    epoch = time.time_ns()
    instance_id = f"encoder-{epoch:x}"
    address = advertised_address(config.server, port)
    return common_pb2.Description(
        contract=CONTRACT,
        features=("frame_runs", "segments", bundles.FEATURE),
        role="encoder",
        instance_id=instance_id,
        epoch=epoch,
        advertised_address=address,
        model=config.model,
        family=parts.runner.family,
        digests=common_pb2.Digests(tower=parts.tower_digest, processor=parts.processor_digest),
        rows=parts.runner.row_format.to_proto(),
        workers=(common_pb2.Worker(instance_id=instance_id, epoch=epoch, address=address),),
        transports=("nixl", "grpc") if parts.transfer else ("grpc",),
        max_item_patches=config.max_item_patches,
        version=chiasm.__version__,
    )


def _limits(config: EncoderConfig) -> EngineLimits:
    return EngineLimits(
        max_batch_patches=config.max_batch_patches,
        max_item_patches=config.max_item_patches,
        segment_rows=config.segment_rows,
        preprocess_workers=config.preprocess_workers,
    )
