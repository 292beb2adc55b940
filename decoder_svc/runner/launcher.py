"""Starts the processes of this machine's ranks and joins them to those of other machines.

Ranks come from a fork server that has imported torch: it starts none of torch's threads and touches
no GPU, so its children may do both, a few milliseconds after they were asked for.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from chiasm.config import DecoderConfig
from decoder_svc.config.from_hf import TextConfig
from decoder_svc.embeddings.bank_channel import BankPort
from decoder_svc.embeddings.slab import Slab
from decoder_svc.parallel.launch import Rendezvous
from decoder_svc.runner.codec import Start
from decoder_svc.runner.group import Member, RankGroup
from decoder_svc.runner.hub import RankHub, read_token
from decoder_svc.runner.worker import RankTask, run_rank

_PRELOADED = ["decoder_svc.runner.worker", "decoder_svc.models.qwen2_5_vl"]


def rank_context() -> ForkServerContext:
    """The way ranks' processes are started."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def start_rank(
    context: ForkServerContext,
    task: RankTask,
    channel: Connection,
    bank_channel: Connection | None = None,
) -> BaseProcess:
    """A process that ends with this one; the channels' ends are its own from now on."""
    arguments = (task, channel, bank_channel)
    process = context.Process(target=run_rank, args=arguments, name=f"rank-{task.rank}")
    process.daemon = True
    process.start()
    channel.close()
    if bank_channel is not None:
        bank_channel.close()
    return process


class Launcher:
    """Starts groups of ranks: here, and of those that other hosts have sent.

    Args:
        config: Of the decoder.
        text: Of the checkpoint.
        model_dir: The checkpoint.
        slab: Where rows of media land; ranks of the first stage attach to it.
        row_dtype: Of these rows.
        rendezvous: Which hosts there are; this is the first.
        bank_port: Gets a channel to each first rank, if rows are to be written to its memory.

    Raises:
        ValueError: Stages cannot be spread over the hosts, or there is no secret to know ranks by.
        Unavailable: The port where other hosts' ranks come in is taken.
    """

    def __init__(
        self,
        config: DecoderConfig,
        text: TextConfig,
        model_dir: Path,
        *,
        slab: Slab,
        row_dtype: str,
        rendezvous: Rendezvous,
        bank_port: BankPort | None = None,
    ) -> None:
        self._bank_port, self._context = bank_port, rank_context()
        self._directory = tempfile.TemporaryDirectory(prefix="chiasm-ranks-")
        parallel = config.parallel
        local = rendezvous.local_ranks(tp_size=parallel.tp_size, pp_size=parallel.pp_size)
        first = RankTask(
            rank=local[0],
            local_rank=local[0],
            num_local=len(local),
            config=config,
            model_dir=model_dir,
            text=text,
            row_dtype=row_dtype,
            slab_name=slab.name,
            slab_bytes=slab.size,
            rendezvous=rendezvous,
            store_path=f"{self._directory.name}/store",
        )
        self._tasks = tuple(replace(first, rank=rank, local_rank=rank) for rank in local)
        self._hub = _hub(rendezvous, config, range(len(local), parallel.world_size))

    def __call__(self, start: Start) -> RankGroup | None:
        """Starts every rank of this machine, once those of other machines have come.

        Raises:
            RanksLost: One is gone at once.
        """
        remote: Sequence[Member] = ()
        if self._hub is not None:
            remote = self._hub.take()
            if not remote:
                return None
        members = []
        for task in self._tasks:
            ours, theirs = self._context.Pipe()
            bank = self._bank_channel() if task.rank == 0 else None
            members.append(Member(task.rank, ours, start_rank(self._context, task, theirs, bank)))
        return RankGroup([*members, *remote], start)

    def _bank_channel(self) -> Connection | None:
        if self._bank_port is None:
            return None
        ours, theirs = self._context.Pipe()
        self._bank_port.put(ours)
        return theirs

    def close(self) -> None:
        """Removes what ranks met over."""
        if self._hub is not None:
            self._hub.close()
        self._directory.cleanup()


def _hub(rendezvous: Rendezvous, config: DecoderConfig, remote: range) -> RankHub | None:
    """Where the ranks of other hosts come in; None when there are no others."""
    if rendezvous.num_nodes == 1:
        return None
    return RankHub(rendezvous, read_token(config.parallel.rank_token_file), remote)
