"""What the encoder's cache is worth: the same load with and without repeated pictures.

64 clients, the demo model, one encoder, one decoder. With: four of five requests show one of a few
pictures that everybody shows. Without: every file differs by a serial number, so nothing is found.
The decoder's own prefix cache is off: it would find the same pictures and hide the encoder's.
Run it as `python -m bench.cache`; the two take turns, so other work on the machine meets both.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import statistics
import sys
from typing import Any

from PIL import Image

from bench.load import Round, Target, Window, run_round
from bench.pool import Item, Pool
from chiasm.cli.bench import percentile
from chiasm.cli.machine import Layout, Machine

POPULAR = 8
REPEATED = 0.8


class Popular(Pool):
    """Questions about pictures that come back, or about such that never do.

    Args:
        size: Different drawings.
        side: Pixels of each, square.
        repeated: Share of requests that show one of `POPULAR` files.
    """

    def __init__(self, size: int, *, side: int, repeated: float) -> None:
        super().__init__(size)
        self.items = tuple(_enlarged(item, side) for item in self.items)
        self._repeated = repeated
        self._turns = itertools.count()
        self._fixed = [super(Popular, self).messages(index) for index in range(POPULAR)]

    def messages(self, index: int) -> list[dict[str, Any]]:
        """A chat with a popular picture, or with a file of its own."""
        turn = next(self._turns)
        if (turn % 10) < self._repeated * 10:
            return self._fixed[turn % POPULAR]
        return super().messages(index)


def _enlarged(item: Item, side: int) -> Item:
    file = io.BytesIO()
    Image.open(io.BytesIO(item.picture)).resize((side, side)).save(file, "PNG")
    return Item(file.getvalue(), item.text, item.answer)


async def run(options: argparse.Namespace) -> None:
    pools = {
        f"{share:.0%} repeated": Popular(64, side=options.side, repeated=share)
        for share in (REPEATED, 0.0)
    }
    found: dict[str, list[Round]] = {name: [] for name in pools}
    window = Window(ramp_s=options.ramp_s, length_s=options.window_s)
    layout = Layout(
        encoders=1, port=0, drain_s=2.0, log_level="warning", decoder_args="--no-prefix-cache"
    )
    async with Machine(layout, _relay) as machine:
        target = Target("chiasm", (await machine.start()).url, "demo")
        for turn in range(options.rounds):
            for name, pool in pools.items():
                found[name].append(
                    await run_round(
                        target,
                        pool,
                        first=turn * 1000,
                        clients=options.clients,
                        window=window,
                        max_tokens=16,
                    )
                )
    print(_table(found))


def _relay(name: str, line: str) -> None:
    print(f"{name}: {line}", file=sys.stderr)


def _table(found: dict[str, list[Round]]) -> str:
    lines = ["| pictures | requests/s | first text, p50 / p99 ms |", "|---|---|---|"]
    rates, firsts = [], []
    for name, rounds in found.items():
        times = sorted(sample.first_s * 1e3 for one in rounds for sample in one.samples)
        rates.append(statistics.median(one.rate for one in rounds))
        firsts.append(percentile(times, 50))
        lines.append(
            f"| {name} | {rates[-1]:.1f} | {firsts[-1]:.0f} / {percentile(times, 99):.0f} |"
        )
    lines.append(f"| change | {rates[0] / rates[1] - 1:+.0%} | {firsts[0] / firsts[1] - 1:+.0%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cache", description=__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--window-s", type=float, default=12.0)
    parser.add_argument("--ramp-s", type=float, default=6.0)
    parser.add_argument("--side", type=int, default=448, help="pixels of a picture's side")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
