"""Ways to cut `chiasm.kernels.mid_rows_triton` against cuBLAS, in the shapes of a 7B decoder.

    python -m bench.kernel_mid_rows --seconds 150 --json best.json --layer
    python -m bench.kernel_mid_rows --take best.json --layer

Every cut is checked against float32 before it is timed, in CUDA graphs over the weights of 28
layers. `--layer` then times the four products of all layers in order, first with the GPU cool and
then after two seconds under load. `--tiny` is a rehearsal on the CPU (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from triton import OutOfResources
from triton.errors import TritonError
from triton.runtime.jit import JITFunction

from bench.kernel_linear import HIDDEN, INNER, QKV, VOCABULARY
from bench.kernels import Entry, microseconds, relative
from chiasm.kernels.launch import INTERPRETED, ceil_div, power_of_two
from chiasm.kernels.mid_rows_triton import Cut, launch_mid_rows, room

PROCESSORS, SHARED_BYTES, LARGEST_ERROR = 132, 232448, 1e-2
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured: of the model, or of a rehearsal."""

    device: str
    shapes: dict[str, tuple[int, int]]
    rows: tuple[int, ...]
    layers: int


MODEL = Sizes(
    "cuda",
    {
        "down": (HIDDEN, INNER), "out": (HIDDEN, HIDDEN), "qkv": (QKV, HIDDEN),
        "gate_up": (2 * INNER, HIDDEN), "lm_head": (VOCABULARY, HIDDEN),
    },
    (256, 128, 64), 28,
)  # fmt: skip
TINY = Sizes(
    "cpu",
    {
        "down": (136, 264), "out": (136, 136), "qkv": (144, 136), "gate_up": (528, 136),
        "lm_head": (600, 136),
    },
    (64, 40), 2,
)  # fmt: skip

BASES: dict[int, list[tuple[Cut, int]]] = {
    64: [
        (Cut(64, 128, 3, 4, 0), 2), (Cut(64, 64, 6, 4, 0), 2), (Cut(128, 64, 4, 4, 0), 2),
        (Cut(128, 64, 3, 4, 0), 3), (Cut(128, 128, 4, 8, 0), 1), (Cut(256, 64, 5, 8, 0), 1),
        (Cut(128, 64, 4, 4, 0, False), 2), (Cut(256, 64, 5, 4, 0, False), 1),
    ],
    128: [
        (Cut(256, 64, 4, 8, 0), 1), (Cut(256, 64, 4, 8, 0, False), 1), (Cut(128, 64, 3, 4, 0), 2),
        (Cut(128, 64, 6, 8, 0), 1), (Cut(128, 128, 3, 8, 0), 1), (Cut(64, 64, 4, 4, 0), 2),
        (Cut(128, 64, 6, 8, 0, False), 1), (Cut(128, 64, 3, 8, 0), 2),
    ],
    256: [
        (Cut(128, 64, 4, 8, 0), 1), (Cut(128, 64, 4, 8, 0, False), 1), (Cut(128, 128, 2, 8, 0), 1),
        (Cut(64, 64, 2, 4, 0), 2), (Cut(64, 64, 5, 8, 0), 1), (Cut(128, 64, 3, 8, 0), 1),
    ],
}  # fmt: skip
"""Cuts for up to so many rows, and how many programs of each a processor has room for."""


@dataclass(slots=True)
class Cell:
    """A weight's shape at a number of rows."""

    name: str
    rows: int
    x: torch.Tensor
    weights: list[torch.Tensor]
    ready: list[Cut] = field(default_factory=list)
    """Cuts that are compiled."""

    @property
    def key(self) -> str:
        return f"{self.name} {self.rows}"

    def cuts(self) -> Iterator[Cut]:
        """Spans of equal length, split-K that fits at once, and a program for each tile."""
        outputs, _ = self.weights[0].shape
        block = max(64, power_of_two(self.rows))
        for base, abreast in BASES[block]:
            assert (base.rows + block) * base.step * 2 * base.stages < SHARED_BYTES
            at_once, tiles = PROCESSORS * abreast, ceil_div(outputs, base.rows)
            counts = [at_once]
            if splits := at_once // tiles:
                counts.append(splits * tiles)
            if tiles > 0.9 * at_once:
                counts.append(0)
            for count in dict.fromkeys(counts):
                yield Cut(base.rows, base.step, base.stages, base.warps, count, base.weight_first)


def cells_of(sizes: Sizes) -> list[Cell]:
    """All cells; the rows of one shape share its weights."""
    make: dict[str, Any] = {"device": sizes.device, "dtype": torch.bfloat16}
    if sizes.device == "cpu":
        make["dtype"] = torch.float16  # the interpreter's NumPy has no bfloat16
    weights = {
        name: [
            torch.randn(*shape, **make).mul_(shape[1] ** -0.5)
            for _ in range(2 if name == "lm_head" else sizes.layers)
        ]
        for name, shape in sizes.shapes.items()
    }
    order = [(name, rows) for name in sizes.shapes if name != "lm_head" for rows in sizes.rows]
    order += [("lm_head", rows) for rows in sizes.rows]
    return [
        Cell(name, rows, torch.randn(rows, sizes.shapes[name][1], **make), weights[name])
        for name, rows in order
    ]


def compile_cuts(cells: list[Cell], until: float) -> None:
    """Compiles in threads until that time; what is not done by then is left out."""
    run = JITFunction.run

    def only_compile(self: Any, *args: object, warmup: bool, **options: object) -> object:
        return run(self, *args, warmup=True, **options)

    def compiled(cell: Cell, cut: Cut) -> bool:
        if time.monotonic() > until:
            return False
        launch_mid_rows(cell.x, cell.weights[0], None, cut)
        return True

    threads = 1 if INTERPRETED else 16  # the interpreter runs the kernel, and only one at a time
    with mock.patch.object(JITFunction, "run", only_compile), ThreadPoolExecutor(threads) as pool:
        work = [
            (cell, cut, pool.submit(compiled, cell, cut)) for cell in cells for cut in cell.cuts()
        ]
        for cell, cut, future in work:
            try:
                if future.result():
                    cell.ready.append(cut)
            except (TritonError, RuntimeError, CancelledError) as error:
                print(f"{cell.key}: {cut} does not compile: {str(error)[:200]}", flush=True)


def cut_as(cut: Cut) -> Product:
    """The product by our kernel."""
    return lambda x, weight: launch_mid_rows(x, weight, None, cut)


def time_of(cell: Cell, product: Product) -> float:
    """Microseconds of one product."""
    x, weights = cell.x, cell.weights
    if x.is_cuda:
        call = Entry("", "", lambda number: product(x, weights[number]), len(weights), 0.0)
        return microseconds(call, target_s=0.02)
    started = time.perf_counter()
    product(x, weights[0])
    return (time.perf_counter() - started) * 1e6


def sound(cell: Cell, cut: Cut, wanted: torch.Tensor) -> bool:
    """Right, the same twice, and nothing left behind; what it returned is then overwritten."""
    first = launch_mid_rows(cell.x, cell.weights[0], None, cut)
    second = launch_mid_rows(cell.x, cell.weights[0], None, cut)
    error = relative(first, wanted)
    same, left = torch.equal(first, second), bool(room(cell.x.device)[1].any())
    if right := error < LARGEST_ERROR and same and not left:
        first.fill_(torch.nan)
        second.fill_(torch.nan)
    else:
        print(f"{cell.key}: {cut} is WRONG: {error=} {same=} {left=}", flush=True)
    return right


def measure(cell: Cell, until: float) -> dict[str, Any]:
    """One cell's times, the best first."""
    wanted = cell.x.float() @ cell.weights[0].float().t()
    cublas = time_of(cell, F.linear)
    found: list[tuple[float, Cut]] = []
    for cut in cell.ready:
        if time.monotonic() > until:
            print(f"{cell.key}: out of time before {cut}", flush=True)
            break
        try:
            if sound(cell, cut, wanted):
                found.append((time_of(cell, cut_as(cut)), cut))
        except OutOfResources as error:
            print(f"{cell.key}: {cut}: {error}", flush=True)
    cublas = min(cublas, time_of(cell, F.linear))
    found.sort(key=lambda pair: pair[0])
    print(f"{cell.key}: cuBLAS {cublas:.1f} us", flush=True)
    for took, cut in found:
        print(f"    {took:8.1f}  {cublas / took:5.3f}  {short(cut)}", flush=True)
    return {"cublas": cublas, "cuts": [{"us": took, **asdict(cut)} for took, cut in found]}


def short(cut: Cut) -> str:
    """A line's name of a cut."""
    first = "weight" if cut.weight_first else "x"
    return (
        f"{cut.rows} x {cut.step} stages {cut.stages} warps {cut.warps}"
        f" programs {cut.programs} {first} first"
    )


def product_of(result: dict[str, Any] | None, own: bool, best: bool) -> Product:
    """cuBLAS, our own best cut, or what was faster."""
    if not own or not result or not result["cuts"]:
        return F.linear
    first = dict(result["cuts"][0])
    if first.pop("us") > result["cublas"] and best:
        return F.linear
    return cut_as(Cut(**first))


def layer_times(cells: list[Cell], products: list[Product], load_s: float) -> tuple[float, float]:
    """Microseconds of a layer: cool, and under load."""
    layers = len(cells[0].weights)

    def all_layers() -> None:
        for number in range(layers):
            for cell, product in zip(cells, products, strict=True):
                product(cell.x, cell.weights[number])

    all_layers()
    if not cells[0].x.is_cuda:
        return 0.0, 0.0
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_layers()
    time.sleep(0.5)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    started = time.monotonic()
    while len(times) < 12 or time.monotonic() - started < load_s:
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / layers)
    return statistics.median(times[2:10]), statistics.median(times[-(len(times) // 3) :])


def time_layers(cells: list[Cell], results: dict[str, Any], load_s: float) -> dict[str, Any]:
    """The four products of a layer, by number of rows and way."""
    times: dict[str, Any] = {}
    for rows in dict.fromkeys(cell.rows for cell in cells):
        of = {cell.name: cell for cell in cells if cell.rows == rows}
        chain = [of[name] for name in ("qkv", "out", "gate_up", "down")]
        for way, own, best in (
            ("cuBLAS", False, False), ("own", True, False), ("faster of both", True, True),
            ("cuBLAS again", False, False),
        ):  # fmt: skip
            products = [product_of(results.get(cell.key), own, best) for cell in chain]
            cool, warm = times[f"{way} {rows}"] = layer_times(chain, products, load_s)
            print(f"layer, {rows} rows, {way}: {cool:.1f} us, under load {warm:.1f}", flush=True)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=150.0, help="compiling and sweep together")
    parser.add_argument("--json", type=Path, help="write all times here")
    parser.add_argument("--take", type=Path, help="take the times of an earlier run: no sweep")
    parser.add_argument("--layer", action="store_true", help="then time layers")
    parser.add_argument("--only", default="", help="cells whose name holds the word")
    parser.add_argument("--tiny", action="store_true", help="rehearse on the CPU")
    arguments = parser.parse_args()
    torch.manual_seed(int(time.time()))
    torch.set_grad_enabled(False)
    started = time.monotonic()
    until = started + arguments.seconds
    cells = cells_of(TINY if arguments.tiny else MODEL)
    room(cells[0].x.device)
    results: dict[str, Any] = json.loads(arguments.take.read_text()) if arguments.take else {}
    if not arguments.take:
        swept = [cell for cell in cells if arguments.only in cell.key]
        compile_cuts(swept, started + arguments.seconds * 0.6)
        print(f"compiled after {time.monotonic() - started:.0f} s", flush=True)
        for cell in swept:
            results[cell.key] = measure(cell, until)
            if arguments.json:
                arguments.json.write_text(json.dumps(results))
    if arguments.layer:
        results["layers"] = time_layers(cells, results, load_s=2.0)
        if arguments.json:
            arguments.json.write_text(json.dumps(results))
    print(f"{time.monotonic() - started:.0f} s in all", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
