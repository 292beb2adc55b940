"""Builds a decoder's parts from its config: weights, pages, slab, engine. Starts nothing."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from chiasm.config import DecoderConfig
from chiasm.rows import RowFormat
from chiasm.telemetry import DecoderMetrics
from chiasm.transport.base import Region
from decoder_svc.config.from_hf import TextConfig
from decoder_svc.embeddings.bank_channel import BankPort
from decoder_svc.embeddings.receiver import EmbeddingReceiver
from decoder_svc.embeddings.slab import Slab
from decoder_svc.engine.core import EngineCore
from decoder_svc.engine.mailbox import Mailbox
from decoder_svc.engine.messages import PlannedSequence, StepPlan
from decoder_svc.kv_cache.block_pool import BlockPool
from decoder_svc.kv_cache.prefix import PrefixIndex
from decoder_svc.parallel.launch import rendezvous_of
from decoder_svc.parallel.mesh import ParallelMesh
from decoder_svc.parallel.stages import check_layout
from decoder_svc.runner.executor import Executor
from decoder_svc.runner.inline import InlineExecutor
from decoder_svc.runner.launcher import Launcher
from decoder_svc.runner.loading import (
    Placement,
    build_runner,
    choose_placement,
    count_pages,
    load_stage,
    plans_ahead,
    slab_rows,
)
from decoder_svc.runner.rank_rows import bank_wanted, open_rank_rows
from decoder_svc.runner.ranks import RanksExecutor
from decoder_svc.sampling.grammar import GrammarCompiler
from decoder_svc.sampling.params import Draw, SamplingParams
from decoder_svc.scheduler.budget import Limits
from decoder_svc.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

_WARM_UP_TOKENS = 9
# Pages of one grant. Rows are usable grant by grant; between GPUs bytes cost less than messages.
_GRANT_PAGES, _BANK_GRANT_PAGES = 16, 64
_LEAST_TEXT = 32  # behind rows these cost next to nothing, in a step of their own half a step


@dataclass(frozen=True, slots=True)
class Parts:
    """What the service needs besides the engine itself."""

    executor: Executor
    slab: Slab
    rows: RowFormat
    num_blocks: int
    slab_pages: int
    max_model_len: int
    grammars: GrammarCompiler
    bank: Region | BankPort | None = None
    """The slab's second bank: in this process, or in that of the first rank; None without one."""


def load_parts(config: DecoderConfig, text: TextConfig, model_dir: Path) -> Parts:
    """Loads the weights and takes the memory, in this process or in one per rank.

    Raises:
        ValueError: The settings ask for what this build or this machine cannot do.
    """
    parallel = config.parallel
    check_layout(text, tp_size=parallel.tp_size, pp_size=parallel.pp_size, ep_size=parallel.ep_size)
    load = _load_one_rank if parallel.world_size == 1 else _load_ranks
    return load(config, text, model_dir)


def _load_one_rank(config: DecoderConfig, text: TextConfig, model_dir: Path) -> Parts:
    """The whole model in this process."""
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    mesh, placement = ParallelMesh(), choose_placement(config)
    rows, slab_pages = _slab(config, text, placement)
    model = load_stage(
        model_dir,
        text,
        mesh,
        placement,
        load_format=config.load_format,
        fp8_matmul=config.fp8_matmul,
    )
    shape = (slab_pages * config.memory.slab_page_rows, rows.hidden_size * rows.levels)
    dtype: torch.dtype = getattr(torch, rows.dtype)
    bank = open_rank_rows(config, mesh, placement.device, shape=shape, dtype=dtype)
    num_blocks = count_pages(config, text, mesh, placement)
    max_model_len = _max_model_len(config, text, num_blocks)
    slab = Slab(slab_pages * config.memory.slab_page_rows * rows.row_bytes)
    view = slab_rows(slab.view(), rows)
    grammars = GrammarCompiler.of(model_dir, text)
    runner = build_runner(config, model, num_blocks=num_blocks, rows=view, grammars=grammars)
    runner.rank_rows = bank
    executor = InlineExecutor(runner, depth=1 + runner.ahead)
    region = None if bank is None else bank.region
    return Parts(executor, slab, rows, num_blocks, slab_pages, max_model_len, grammars, region)


def _load_ranks(config: DecoderConfig, text: TextConfig, model_dir: Path) -> Parts:
    """A process for every rank; this one computes nothing."""
    placement = choose_placement(config)
    rows, slab_pages = _slab(config, text, placement)
    port = BankPort() if bank_wanted(config, placement.device) else None
    slab = Slab(slab_pages * config.memory.slab_page_rows * rows.row_bytes)
    with ExitStack() as undo:
        undo.callback(slab.close)
        launcher = Launcher(
            config,
            text,
            model_dir,
            slab=slab,
            row_dtype=rows.dtype,
            rendezvous=rendezvous_of(os.environ),
            bank_port=port,
        )
        executor = RanksExecutor(launcher, depth=config.parallel.pp_size + plans_ahead(config))
        undo.callback(executor.close)
        num_blocks = executor.start()
        max_model_len = _max_model_len(config, text, num_blocks)
        undo.pop_all()
    grammars = GrammarCompiler.of(model_dir, text)
    return Parts(executor, slab, rows, num_blocks, slab_pages, max_model_len, grammars, port)


def _slab(config: DecoderConfig, text: TextConfig, placement: Placement) -> tuple[RowFormat, int]:
    """The format of rows, and pages of the slab."""
    dtype = placement.dtype_name if config.row_dtype == "auto" else config.row_dtype
    rows = RowFormat(text.hidden_size, 1 + text.deepstack_levels, dtype)
    return rows, _slab_pages(config, rows)


def build_engine(
    config: DecoderConfig, parts: Parts, mailbox: Mailbox, metrics: DecoderMetrics
) -> EngineCore:
    """The engine over loaded parts."""
    pool = BlockPool(parts.num_blocks)
    receiver = EmbeddingReceiver(
        pages=parts.slab_pages,
        page_rows=config.memory.slab_page_rows,
        row_bytes=parts.rows.row_bytes,
        grant_pages=_GRANT_PAGES if parts.bank is None else _BANK_GRANT_PAGES,
        row_format=parts.rows,
    )
    scheduler = Scheduler(
        Limits(
            max_running=config.scheduler.max_running_requests,
            chunk_tokens=config.scheduler.chunked_prefill_size,
            block_size=config.memory.block_size,
            depth=config.parallel.pp_size,
            ahead=parts.executor.depth > config.parallel.pp_size,
            most_rows=parts.executor.most_rows,
            mixed_tokens=config.scheduler.max_mixed_tokens,
            prefill_delay=config.scheduler.max_prefill_delay,
            least_text=_LEAST_TEXT,
        ),
        pool=pool,
        receiver=receiver,
        prefix=PrefixIndex(pool) if config.scheduler.prefix_cache else None,
        metrics=metrics,
    )
    return EngineCore(
        scheduler=scheduler,
        receiver=receiver,
        executor=parts.executor,
        mailbox=mailbox,
        metrics=metrics,
        embedding_timeout_s=config.embedding_timeout_s,
    )


def warm_up(executor: Executor, *, num_blocks: int, block_size: int) -> None:
    """One prompt and one token through the model, on pages that nobody reads before writing."""
    table = tuple(range(min(num_blocks, -(-_WARM_UP_TOKENS // block_size))))
    prompt = min(_WARM_UP_TOKENS, len(table) * block_size) - 1
    draw = Draw(SamplingParams(max_tokens=1), 0, 0)
    for step, (start, ids) in enumerate(((0, (0,) * prompt), (prompt, (0,)))):
        sequence = PlannedSequence(
            request_id="warm-up",
            choice=0,
            seat=0,
            token_ids=ids,
            start=start,
            position=start,
            block_table=table,
            draw=draw,
        )
        if ids:
            executor.submit(StepPlan(step, (sequence,)))
            while executor.collect() is None:
                pass


def _slab_pages(config: DecoderConfig, rows: RowFormat) -> int:
    """Half the slab is the oldest request's own.

    Its choices may still need the rows of a last, unfilled page of K and V, one slab page a row at
    worst, and these must leave room for the next row.
    """
    memory = config.memory
    pages = memory.slab_bytes // (memory.slab_page_rows * rows.row_bytes)
    least = 2 * (memory.block_size + 1)
    if pages < least:
        raise ValueError(
            f"--slab-bytes {memory.slab_bytes} holds {pages} pages of rows, {least} are needed"
        )
    return pages


def _max_model_len(config: DecoderConfig, text: TextConfig, num_blocks: int) -> int:
    wanted = config.max_model_len or text.max_positions
    if wanted > text.max_positions:
        raise ValueError(
            f"--max-model-len {wanted} is more than the model's {text.max_positions} positions"
        )
    room = num_blocks * config.memory.block_size
    if room < wanted:
        logger.warning("pages for %d tokens only: max_model_len %d -> %d", room, wanted, room)
    return min(wanted, room)
