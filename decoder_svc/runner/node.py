"""A host that only lends ranks: `python -m decoder_svc` with a node rank above 0.

Its ranks dial the engine on the first host and wait to be started. One that ends (its engine has
started over, or it failed) is replaced, for ever, until SIGTERM.
"""

from __future__ import annotations

import logging
import signal
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from chiasm.checkpoint import resolve_model
from chiasm.config import DecoderConfig
from decoder_svc.config.from_hf import read_text_config
from decoder_svc.parallel.launch import Rendezvous
from decoder_svc.parallel.stages import check_layout
from decoder_svc.runner.hub import dial, read_token
from decoder_svc.runner.launcher import rank_context, start_rank
from decoder_svc.runner.worker import RankTask

logger = logging.getLogger(__name__)

_RETRY_S = 1.0


def lend_ranks(config: DecoderConfig, rendezvous: Rendezvous) -> None:
    """Runs this host's ranks until SIGTERM.

    Raises:
        ValueError: Settings or a checkpoint that cannot be served.
    """
    parallel = config.parallel
    token = read_token(parallel.rank_token_file)
    model_dir = resolve_model(config.model)
    text = read_text_config(model_dir)
    check_layout(text, tp_size=parallel.tp_size, pp_size=parallel.pp_size, ep_size=parallel.ep_size)
    local = rendezvous.local_ranks(tp_size=parallel.tp_size, pp_size=parallel.pp_size)
    tasks = [
        RankTask(
            rank=rank,
            local_rank=index,
            num_local=len(local),
            config=config,
            model_dir=model_dir,
            text=text,
            row_dtype="",
            slab_name="",
            slab_bytes=0,
            rendezvous=rendezvous,
            store_path="",
        )
        for index, rank in enumerate(local)
    ]
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    logger.info("node %d lends ranks %s", rendezvous.node_rank, list(local))
    _keep(tasks, token, stop)


def _keep(tasks: list[RankTask], token: bytes, stop: threading.Event) -> None:
    context = rank_context()
    processes: dict[int, BaseProcess] = {}
    while not stop.is_set():
        for task in tasks:
            process = processes.get(task.rank)
            if process is not None and process.is_alive():
                continue
            channel = _dial(task, token)
            if channel is not None:
                processes[task.rank] = start_rank(context, task, channel)
        stop.wait(_RETRY_S)
    for process in processes.values():
        process.kill()
        process.join()


def _dial(task: RankTask, token: bytes) -> Connection | None:
    """A channel, or None while the engine is not there."""
    try:
        return dial(task.rendezvous, token, task.rank)
    except (OSError, EOFError) as error:
        logger.info("the engine is not there yet: %s", error)
    except AuthenticationError:
        logger.error("the engine has another secret")
    return None
