"""How busy the machine's cores are, and with whose work. Linux: reads /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_LOOK_S = 2.0
_QUIET = 0.3  # cores
_BUSY = (1, 2, 3, 6, 7, 8)  # of a line of /proc/stat: all but idle, waiting for disks, and guests


@dataclass(frozen=True, slots=True)
class Reading:
    """CPU seconds since the start: of these processes and of everything."""

    at: float
    own_s: float
    all_s: float


@dataclass(frozen=True, slots=True)
class Use:
    """Mean cores between two readings."""

    seconds: float
    own: float
    others: float


def read(pids: Iterable[int]) -> Reading:
    """Now. Processes of `pids` that have ended count nothing."""
    own_s = sum(map(process_s, {*pids, os.getpid()}))
    fields = Path("/proc/stat").read_text().splitlines()[0].split()
    return Reading(time.monotonic(), own_s, sum(int(fields[i]) for i in _BUSY) * _TICK_S)


def between(first: Reading, last: Reading) -> Use:
    """Mean use from the first reading to the last."""
    seconds = last.at - first.at
    own = (last.own_s - first.own_s) / seconds
    return Use(seconds, own, max(0.0, (last.all_s - first.all_s) / seconds - own))


def wait_until_quiet(patience_s: float) -> None:
    """Returns once other programs use hardly anything, or after `patience_s` all the same."""
    begin = read(())
    while (last := read(())).at - begin.at < patience_s:
        time.sleep(_LOOK_S)
        if between(last, read(())).others < _QUIET:
            return


def describe() -> str:
    """Such as `2 cores, AMD EPYC`."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores, {names[0] if names else 'unknown processor'}"


def process_s(pid: int) -> float:
    """CPU seconds of a process so far; 0 once it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def children(pid: int) -> list[int]:
    """Every process that it, or a child of it, has started and that lives."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    own = [int(word) for word in text.split()]
    return own + [below for child in own for below in children(child)]


def calibrate_ms() -> float:
    """CPU milliseconds of a fixed piece of Python: how fast a core is at this moment."""
    began = time.process_time()
    total = 0
    for number in range(500_000):
        total += number & 3
    return (time.process_time() - began) * 1e3
