"""A rank: a process that loads its stage, then computes step plans until the engine lets go of it.

It never decides anything. Should it raise, it says so and ends; the engine starts all ranks anew.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import select
import signal
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from chiasm.collector import keep_loaded_objects
from chiasm.config import DecoderConfig
from chiasm.logs import setup_logging
from chiasm.process import end_with_parent
from chiasm.rows import RowFormat
from decoder_svc.config.from_hf import TextConfig
from decoder_svc.embeddings.slab import Slab
from decoder_svc.engine.messages import StepPlan
from decoder_svc.parallel.launch import Rendezvous, join, least
from decoder_svc.parallel.mesh import ParallelMesh
from decoder_svc.parallel.pp import StageLink
from decoder_svc.runner.codec import Alive, Failed, Message, Ready, Start, decode, encode
from decoder_svc.runner.loading import (
    build_runner,
    choose_placement,
    count_pages,
    load_stage,
    plans_ahead,
    slab_rows,
)
from decoder_svc.runner.model_runner import ModelRunner
from decoder_svc.runner.outcome import Outcome
from decoder_svc.runner.rank_rows import BankKeeper, open_rank_rows
from decoder_svc.sampling.grammar import GrammarCompiler

logger = logging.getLogger(__name__)

BEAT_S = 1.0
MEETING_S = 600.0
"""Longest that a rank waits for another, in a collective or for hidden states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """What a rank is told as its process starts: our own values, from our own command line."""

    rank: int
    local_rank: int
    """Its place among the ranks of this machine: which GPU is its own."""
    num_local: int
    config: DecoderConfig
    model_dir: Path
    text: TextConfig
    row_dtype: str
    slab_name: str
    """Shared memory of this machine; ranks behind the first stage leave it alone."""
    slab_bytes: int
    rendezvous: Rendezvous
    store_path: str
    """Beginning of the path of the file that ranks meet over, when they are of one host."""

    @property
    def mesh(self) -> ParallelMesh:
        """The rank's place, without groups."""
        parallel = self.config.parallel
        return ParallelMesh(
            tp_rank=self.rank % parallel.tp_size,
            tp_size=parallel.tp_size,
            pp_rank=self.rank // parallel.tp_size,
            pp_size=parallel.pp_size,
            ep_size=parallel.ep_size,
        )


class Voice:
    """The rank's side of its channel. Its thread says "alive" and ends the process with the engine,
    and with the process that started it: on another host that is not the engine's.

    Args:
        channel: To the engine.
    """

    def __init__(self, channel: Connection) -> None:
        self._channel = channel
        self._lock = threading.Lock()

    def say(self, message: Message) -> None:
        """Sends; from any thread."""
        with self._lock:
            self._channel.send_bytes(encode(message))

    def hear(self) -> Message:
        """Waits for the engine's next word. Raises EOFError once it has let go."""
        return decode(self._channel.recv_bytes())

    def start_beating(self) -> None:
        """A rank that waits for a dead peer cannot look at its channel: a thread does."""
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def _beat(self) -> None:
        poller = select.poll()
        poller.register(self._channel.fileno(), select.POLLRDHUP)
        if starter := multiprocessing.parent_process():
            # The fork server does not end with its starter while ranks of it live.
            poller.register(starter.sentinel, select.POLLIN | select.POLLHUP)
        try:
            while not poller.poll(BEAT_S * 1e3):
                self.say(Alive())
        finally:
            os._exit(0)  # who is served has gone, and with it whatever this rank waits for


class ResultThread:
    """Waits for steps that a GPU still computes, so that the next one can be started meanwhile.

    Args:
        voice: Says the results.
    """

    def __init__(self, voice: Voice) -> None:
        self._voice = voice
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._num_told = self._num_put = 0
        threading.Thread(target=self._tell, name="results", daemon=True).start()

    def put(self, outcome: Outcome) -> None:
        """Says the result at once if it is known and none is waited for, else in the thread."""
        if self._num_told == self._num_put and outcome.is_known:
            self._voice.say(outcome.wait())
            return
        self._num_put += 1
        self._outcomes.put(outcome)

    def _tell(self) -> None:
        try:
            while True:
                self._voice.say(self._outcomes.get().wait())
                self._num_told += 1
        except (OSError, RuntimeError, ValueError):
            logger.exception("a step's result was lost")
        finally:
            os._exit(1)


def run_rank(task: RankTask, channel: Connection, bank_channel: Connection | None = None) -> None:
    """The life of a rank's process, once the engine can be reached. Never returns."""
    end_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the engine's business
    setup_logging(task.config.server.log_level)
    voice = Voice(channel)
    code = 1
    try:
        _serve(task, voice, bank_channel)
    except EOFError:
        code = 0
    except Exception as error:  # whatever it is, the engine learns of it and this process ends
        logger.exception("rank %d failed", task.rank)
        is_users = isinstance(error, ValueError)
        voice.say(Failed(str(error) if is_users else type(error).__name__, is_users))
    finally:
        os._exit(code)  # an orderly end of a process group would wait for peers


def _serve(task: RankTask, voice: Voice, bank_channel: Connection | None) -> None:
    start = voice.hear()
    assert isinstance(start, Start), "the first word is Start"
    voice.start_beating()
    runner = _load(task, start, bank_channel)
    keep_loaded_objects()
    voice.say(Ready(runner.num_blocks, runner.most_rows))
    results = ResultThread(voice)
    while True:
        plan = voice.hear()
        assert isinstance(plan, StepPlan), "then come plans"
        outcome = runner.run(plan)
        if outcome is not None:
            results.put(outcome)


def _load(task: RankTask, start: Start, bank_channel: Connection | None) -> ModelRunner:
    config, text = task.config, task.text
    placement = choose_placement(config, local_rank=task.local_rank)
    if placement.device.type == "cuda":
        torch.cuda.set_device(placement.device)
    else:
        cores = config.num_threads or os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // task.num_local))
    mesh = join(
        task.mesh,
        start.group,
        rendezvous=task.rendezvous,
        store_path=task.store_path,
        device=placement.device,
        dtype=placement.dtype,
        timeout_s=MEETING_S,
    )
    model = load_stage(
        task.model_dir,
        text,
        mesh,
        placement,
        load_format=config.load_format,
        fp8_matmul=config.fp8_matmul,
    )
    rows = _rows(task, mesh)
    shape = (len(rows), rows.shape[1])
    bank = open_rank_rows(config, mesh, placement.device, shape=shape, dtype=rows.dtype)
    if bank is not None and bank.memory is not None and bank_channel is not None:
        BankKeeper(bank.region, bank_channel)
    num_blocks = start.num_blocks or least(
        count_pages(config, text, mesh, placement), placement.device
    )
    link = StageLink(
        mesh, hidden_size=text.hidden_size, dtype=placement.dtype, device=placement.device
    )
    grammars = GrammarCompiler.of(task.model_dir, text)
    samples = mesh.is_last_stage and (mesh.tp_rank == 0 or plans_ahead(config))
    if samples and grammars.available:  # the first request with a grammar need not wait for it
        threading.Thread(target=grammars.load, name="tokenizer", daemon=True).start()
    runner = build_runner(
        config,
        model,
        num_blocks=num_blocks,
        rows=rows,
        grammars=grammars,
        link=link,
    )
    runner.rank_rows = bank
    return runner


def _rows(task: RankTask, mesh: ParallelMesh) -> torch.Tensor:
    """[rows, levels x hidden] of the slab, on every rank of the first stage."""
    if not mesh.is_first_stage:
        return torch.empty(0, task.text.hidden_size)
    slab = Slab(task.slab_bytes, name=task.slab_name)
    levels = 1 + task.text.deepstack_levels
    return slab_rows(slab.view(), RowFormat(task.text.hidden_size, levels, task.row_dtype))
