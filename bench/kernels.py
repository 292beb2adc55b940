"""Checks the decoder's kernels on a GPU against float64 or float32 torch, then times them.

    python -m bench.kernels [--only WORD] [--sweep]

Every kernel runs on fresh random data and poisoned outputs. Times are of CUDA graphs that rotate
among buffers of more than 200 MB, so that the cache does not serve them; "of read" is the share of
4.27 TB/s, which a plain read of an H200's memory reaches. `--sweep` tries several ways to cut each
kernel and prints the best of each shape, for the tables in `chiasm/kernels`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

READ_BYTES_S = 4.27e12
ROTATION_BYTES = 200e6
Call = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the table: one way to do a thing, and how much it moves."""

    name: str
    way: str
    call: Call
    """Runs on the buffers of that number."""
    copies: int
    moved: float
    """Bytes read and written, each once."""
    flops: float = 0.0
    check: Callable[[], float] | None = None
    """The relative error; run after `call(0)`."""


def copies_of(moved: float) -> int:
    """How many sets of buffers keep the cache (50 MB) from serving a call."""
    return max(2, min(64, int(ROTATION_BYTES / moved) + 1))


def relative(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference over the norm of what is wanted."""
    return float((out.double() - wanted.double()).norm() / wanted.double().norm())


def microseconds(entry: Entry, target_s: float = 0.01) -> float:
    """The median time of one call, from graphs replayed."""
    for number in range(min(entry.copies, 3)):
        entry.call(number)
    torch.cuda.synchronize()
    calls = entry.copies * max(1, round(16 / entry.copies))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(calls):
            entry.call(number % entry.copies)
    graph.replay()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    started = time.monotonic()
    while len(times) < 5 or (time.monotonic() - started < target_s and len(times) < 50):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)


def compile_all(entries: list[Entry]) -> None:
    """Compiles without running, in threads: most of the compiler runs outside Python's lock."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def only_compile(self: Any, *args: object, warmup: bool, **options: object) -> object:
        return run(self, *args, warmup=True, **options)

    JITFunction.run = only_compile
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda entry: entry.call(0), entries))
    JITFunction.run = run
    torch.cuda.synchronize()


def poison() -> None:
    """Fills memory that the allocator will hand out again with NaN: unwritten results show."""
    blocks = [torch.full((2**size,), torch.nan, device="cuda") for size in range(7, 25)]
    del blocks


def report(entries: list[Entry]) -> bool:
    """Prints the table; false if a result was wrong."""
    sound, best = True, {}
    print(
        f"{'what':<34} {'way':<34} {'us':>8} {'GB/s':>6} {'of read':>7} {'TFLOP/s':>7} {'error':>8}"
    )
    for entry in entries:
        error = float("nan")
        if entry.check is not None:
            poison()
            entry.call(0)
            torch.cuda.synchronize()
            error = entry.check()
            sound &= error < 1e-2
        took = microseconds(entry)
        speed = entry.moved / took / 1e3
        print(
            f"{entry.name:<34} {entry.way:<34} {took:8.2f} {speed:6.0f}"
            f" {speed * 1e9 / READ_BYTES_S:7.1%} {entry.flops / took / 1e6:7.0f} {error:8.1e}",
            flush=True,
        )
        if entry.name not in best or took < best[entry.name][0]:
            best[entry.name] = (took, entry.way)
    print("\nbest of each")
    for name, (took, way) in best.items():
        print(f"{name:<34} {way:<34} {took:8.2f}")
    return sound


def chosen(only: str, sweep: bool) -> Iterator[Entry]:
    """All entries whose name holds the word."""
    from bench import kernel_attention, kernel_layer, kernel_linear, kernel_small

    for module in (kernel_small, kernel_layer, kernel_attention, kernel_linear):
        yield from (entry for entry in module.entries(sweep) if only in entry.name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no GPU here.")
        return 1
    torch.manual_seed(int(time.time()))
    torch.set_grad_enabled(False)
    started = time.monotonic()
    entries = list(chosen(arguments.only, arguments.sweep))
    torch.cuda.synchronize()
    made = time.monotonic()
    compile_all(entries)
    compiled = time.monotonic()
    sound = report(entries)
    print(
        f"{torch.cuda.get_device_name()}; buffers {made - started:.1f} s, compiling"
        f" {compiled - made:.1f} s, {len(entries)} entries {time.monotonic() - compiled:.1f} s"
    )
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
