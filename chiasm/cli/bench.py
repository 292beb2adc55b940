"""`chiasm bench`: a small closed-loop load generator for one gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.progress import track
from rich.table import Table

from chiasm.cli.client import Client, user_message
from chiasm.cli.failure import CommandFailed

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked, how often, by how many at once."""

    images: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = ()
    """Files or URLs that every request carries."""
    prompt: str = "Describe what you see."
    """The question."""
    requests: int = 32
    """Requests in all."""
    concurrency: int = 4
    """Requests under way at any time."""
    max_tokens: int = 32
    """Tokens of every answer."""

    def __post_init__(self) -> None:
        for name in ("requests", "concurrency", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1")


@dataclass(slots=True)
class Sample:
    """One request: seconds to the first piece, between pieces, and in all; or why it failed."""

    first_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    total_s: float = 0.0
    error: str = ""


async def run_bench(client: Client, load: Load) -> int:
    """Sends the load and prints rates and percentiles.

    Returns:
        0 when every request succeeded, else 1.
    """
    console = Console()
    request = {
        "model": await client.model(),
        "messages": [user_message(load.images, load.prompt)],
        "temperature": 0,
        "max_tokens": load.max_tokens,
        "ignore_eos": True,
    }
    gate = asyncio.Semaphore(load.concurrency)

    async def guarded() -> Sample:
        async with gate:
            return await _measure(client, request)

    begin = time.perf_counter()
    tasks = [asyncio.create_task(guarded()) for _ in range(load.requests)]
    samples = [
        await task
        for task in track(
            asyncio.as_completed(tasks), "requests", total=load.requests, console=console,
            transient=True, disable=not console.is_terminal,
        )
    ]  # fmt: skip
    wall_s = time.perf_counter() - begin
    failed = [sample for sample in samples if sample.error]
    good = [sample for sample in samples if not sample.error]
    pieces = sum(len(sample.gaps_s) + 1 for sample in good)
    console.print(
        f"{len(good)} requests in {wall_s:.2f} s: {len(good) / wall_s:.2f} requests/s, "
        f"{pieces / wall_s:.1f} pieces of text/s",
        highlight=False,
    )
    console.print(report(good))
    for message in sorted({sample.error for sample in failed}):
        count = sum(sample.error == message for sample in failed)
        console.print(f"{count} failed: {message}", highlight=False, markup=False)
    return 1 if failed else 0


async def _measure(client: Client, request: dict[str, Any]) -> Sample:
    sample = Sample()
    begin = last = time.perf_counter()
    try:
        async for _ in client.stream(request):
            now = time.perf_counter()
            if sample.first_s:
                sample.gaps_s.append(now - last)
            else:
                sample.first_s = now - begin
            last = now
    except CommandFailed as error:
        sample.error = str(error)
    sample.total_s = time.perf_counter() - begin
    if not sample.first_s and not sample.error:
        sample.error = "the answer is empty"
    return sample


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile of values that need not be sorted; 0.0 of none."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    rank = max(1, -(-len(ordered) * percent // 100))
    return ordered[int(rank) - 1]


def report(samples: Sequence[Sample]) -> Table:
    """Percentiles in milliseconds."""
    table = Table()
    table.add_column("ms")
    for percent in PERCENTILES:
        table.add_column(f"p{percent}", justify="right")
    rows = {
        "time to first token": [s.first_s for s in samples],
        "inter-token latency": [gap for s in samples for gap in s.gaps_s],
        "whole request": [s.total_s for s in samples],
    }
    for name, values in rows.items():
        cells = (f"{percentile(values, percent) * 1000:.1f}" for percent in PERCENTILES)
        table.add_row(name, *cells)
    return table
