"""A rank that traces itself for a while when it is told to: which share of the time its GPU works.

Kernels that wait for another stage (NCCL's SendRecv) are no work. Without a GPU the time inside of
steps stands for it, so that all of it can be tried out.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from decoder_svc.runner import launcher, worker
from decoder_svc.runner.model_runner import ModelRunner
from decoder_svc.runner.worker import RankTask

FOLDER = "CHIASM_BENCH_TRACES"
_BEGIN = "begin"
_WAITS = "SendRecv"


def trace_ranks(folder: Path) -> None:
    """Ranks started from here on are traced; call it before the first."""
    os.environ[FOLDER] = str(folder)
    launcher.run_rank = run_traced_rank


def begin(folder: Path, seconds: float) -> None:
    """Has all ranks trace themselves for so long."""
    (folder / "part").write_text(str(seconds), encoding="utf-8")
    (folder / "part").rename(folder / _BEGIN)


def run_traced_rank(
    task: RankTask, channel: Connection, bank_channel: Connection | None = None
) -> None:
    """In the place of `decoder_svc.runner.worker.run_rank`."""
    tracer = Tracer(Path(os.environ[FOLDER]), task.rank)
    run = ModelRunner.run

    def traced(self: ModelRunner, plan: Any) -> Any:
        return tracer.step(lambda: run(self, plan))

    ModelRunner.run = traced  # type: ignore[method-assign]
    worker.run_rank(task, channel, bank_channel)


class Tracer:
    """Watches for the word to begin, records, writes down what it saw.

    Args:
        folder: Where the word comes and results go.
        rank: Of this process.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._begin = folder / _BEGIN
        self._result = folder / f"rank-{rank}.json"
        self._profile: Any = None
        self._began = self._until = 0.0
        self._inside = 0.0
        self._over = False

    def step(self, compute: Callable[[], Any]) -> Any:
        """One step, recorded or not."""
        if not self._until and not self._over and self._begin.exists():
            self._start()
        entered = time.perf_counter()
        outcome = compute()
        left = time.perf_counter()
        if self._until:
            self._inside += left - entered
            if left >= self._until:
                self._stop(left - self._began)
        return outcome

    def _start(self) -> None:
        seconds = float(self._begin.read_text(encoding="utf-8"))
        if torch.cuda.is_available():
            from torch.profiler import ProfilerActivity, profile

            self._profile = profile(activities=[ProfilerActivity.CUDA])
            self._profile.start()
        self._began = time.perf_counter()
        self._until = self._began + seconds

    def _stop(self, elapsed: float) -> None:
        self._until, self._over = 0.0, True
        found = {"seconds": elapsed, "busy": self._inside / elapsed, "all": self._inside / elapsed}
        if self._profile is not None:
            torch.cuda.synchronize()
            self._profile.stop()
            kernels = [
                (event.name, event.time_range.start, event.time_range.end)
                for event in self._profile.events()
                if event.device_type == torch.autograd.DeviceType.CUDA
            ]
            span = max(e for *_, e in kernels) - min(b for _, b, _ in kernels)
            found["all"] = covered((b, e) for _, b, e in kernels) / span
            work = ((b, e) for name, b, e in kernels if _WAITS not in name)
            found["busy"] = covered(work) / span
        self._result.write_text(json.dumps(found), encoding="utf-8")


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """How much of a line intervals cover together."""
    total, edge = 0.0, float("-inf")
    for begins, ends in sorted(intervals):
        total += max(0.0, ends - max(begins, edge))
        edge = max(edge, ends)
    return total
