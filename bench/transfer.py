"""How fast rows travel: `python -m bench.transfer`. Adds a section to bench/RESULTS-transfer.md.

Sweeps 64 KiB to 512 MiB of rows from an encoder process to a decoder process, over nixl and grpc,
host to host, and GPU to GPU where there are GPUs (to the same one where there is one only). What is
timed begins when the rows are ready in the encoder and ends when the decoder's engine may use them.
Beside them: a bare NIXL WRITE of as many bytes in one piece, and torch's copy in one process.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bench.transfer_bare import run_target, run_writer
from bench.transfer_ends import (
    ROW,
    Ends,
    run_decoder,
    run_encoder,
)

RESULTS = Path(__file__).with_name("RESULTS-transfer.md")
MIB = 1 << 20
PICTURE = 2691 * ROW  # of 1920 x 1080
SIZES = (MIB // 16, MIB // 4, MIB, 4 * MIB, PICTURE, 64 * MIB, 256 * MIB, 512 * MIB)
# A server that has imported torch, and touched no GPU, forks the ends: they are up at once.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["bench.transfer_ends"])
_PATIENCE_S = 120.0


def repeats_of(nbytes: int, most: int) -> int:
    return max(2, min(most, (128 * MIB) // nbytes))


@contextmanager
def process(target: Callable[..., None], *args: object) -> Iterator[Connection]:
    ours, theirs = _CONTEXT.Pipe()
    child = _CONTEXT.Process(target=target, args=(*args, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        yield ours
    finally:
        with suppress(OSError):
            ours.send(None)
        ours.close()
        child.join(10)
        if child.is_alive():
            child.kill()


def hear(pipe: Connection) -> Any:
    if not pipe.poll(_PATIENCE_S):
        raise TimeoutError("the other end does not answer")
    return pipe.recv()


def fetches(ends: Ends, work: Sequence[tuple[int, int]]) -> list[list[float]]:
    rows = [(-(-nbytes // ROW), repeats) for nbytes, repeats in work]
    with process(run_encoder, ends) as encoder:
        source = hear(encoder)
        with process(run_decoder, ends, source, rows) as decoder:
            return [hear(decoder) for _ in work]


def bare(source: str, target: str, work: Sequence[tuple[int, int]]) -> list[list[float]]:
    largest = max(nbytes for nbytes, _ in work)
    with process(run_target, target, largest) as theirs:
        where = hear(theirs)
        with process(run_writer, source, where, work) as ours:
            return [hear(ours) for _ in work]


def copies(source: str, target: str, work: Sequence[tuple[int, int]]) -> list[list[float]]:
    largest = max(nbytes for nbytes, _ in work)
    torch.set_num_threads(1)
    a = torch.zeros(largest, dtype=torch.uint8, device=source)
    b = torch.zeros(largest, dtype=torch.uint8, device=target)
    return [
        [_copy(a[:nbytes], b[:nbytes]) for _ in range(repeats + 1)][1:] for nbytes, repeats in work
    ]


def _copy(a: torch.Tensor, b: torch.Tensor) -> float:
    began = time.perf_counter()
    b.copy_(a)
    if b.is_cuda:
        torch.cuda.synchronize(b.device)
    return time.perf_counter() - began


def table(source: str, target: str, most: int, largest: int) -> Iterator[str]:
    work = [(n, repeats_of(n, most)) for n in SIZES if n <= largest * MIB]
    nixl = fetches(Ends("nixl", source, target), work)
    stream = fetches(Ends("grpc", source, target), work)
    raw = bare(source, target, work)
    copied = copies(source, target, work)
    yield f"### {source} to {target}\n"
    yield (
        "| MiB | nixl, ready to usable | its 90th percentile | grpc, ready to usable "
        "| bare WRITE | torch copy | nixl to bare, rate |"
    )
    yield "|---|---|---|---|---|---|---|"
    for (nbytes, _), ours, theirs, floor, copy in zip(work, nixl, stream, raw, copied, strict=True):
        cells = [
            cell(ours, nbytes),
            f"{sorted(ours)[9 * len(ours) // 10] * 1e3:.3g} ms",
            cell(theirs, nbytes),
            cell(floor, nbytes),
            cell(copy, nbytes),
        ]
        share = statistics.median(floor) / statistics.median(ours)
        yield f"| {nbytes / MIB:.4g} | {' | '.join(cells)} | {share:.0%} |"
    yield ""


def mixed() -> Iterator[str]:
    """Why host rows are not written to a GPU, nor the other way: a bare WRITE between the two."""
    work = [(nbytes, 3) for nbytes in (MIB, PICTURE)]
    yield "\n| bare WRITE | 1 MiB | 18.4 MiB |\n|---|---|---|"
    for source, target in (("pinned", "cuda:0"), ("cuda:0", "pinned")):
        found = bare(source, target, work)
        cells = [cell(s, nbytes) for s, (nbytes, _) in zip(found, work, strict=True)]
        yield f"| {source} to {target} | {' | '.join(cells)} |"


def cell(seconds: Sequence[float], nbytes: int) -> str:
    median = statistics.median(seconds)
    return f"{median * 1e3:.3g} ms, {nbytes / median / 1e9:.3g} GB/s"


def routes() -> list[tuple[str, str]]:
    gpus = torch.cuda.device_count()
    if not gpus:
        return [("cpu", "cpu")]
    return [("cpu", "cpu"), ("cuda:0", "cuda:1" if gpus > 1 else "cuda:0")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=10, help="repeats of the small sizes")
    parser.add_argument("--largest", type=int, default=SIZES[-1] // MIB, help="MiB")
    parser.add_argument("--route", choices=("host", "gpu"), help="one of them only")
    parser.add_argument("--note", default="", help="printed with the results")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    now = datetime.datetime.now(datetime.UTC)
    lines = [f"## {now:%Y-%m-%d %H:%M} UTC\n"]
    began = time.monotonic()
    for source, target in routes():
        if args.route and (args.route == "gpu") != (source != "cpu"):
            continue
        for line in table(source, target, args.most, args.largest):
            print(line, flush=True)
            lines.append(line)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    ucx = ", ".join(f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("UCX_"))
    lines.append(
        f"Medians. {len(os.sched_getaffinity(0))} cores, GPUs: {', '.join(gpus) or 'none'}; torch "
        f"{torch.__version__}; UCX settings: {ucx or 'ours'}; {time.monotonic() - began:.0f} s."
    )
    if gpus:
        lines += mixed()
    if args.note:
        lines.append(f"\n{args.note}")
    text = "\n".join(lines) + "\n"
    print("\n".join(lines[-3:]))
    head = "# How fast rows travel\n" if not args.out.exists() else ""
    with args.out.open("a", encoding="utf-8") as file:
        file.write(f"{head}\n{text}")


if __name__ == "__main__":
    main()
