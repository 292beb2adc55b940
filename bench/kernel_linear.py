"""Linear layers of few rows in `bench.kernels`: the shapes of a 7B decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from bench.kernels import Entry, copies_of, relative
from chiasm.kernels.few_rows_triton import launch_few_rows
from chiasm.kernels.gemv import Shape, few_shape_for, linear

HIDDEN, INNER, QKV, VOCABULARY = 3584, 18944, 4608, 152064
SHAPES = [
    (QKV, HIDDEN),
    (HIDDEN, HIDDEN),
    (2 * INNER, HIDDEN),
    (HIDDEN, INNER),
    (VOCABULARY, HIDDEN),
]
SINGLE = [
    Shape(4, 2048, 8), Shape(2, 2048, 4), Shape(4, 1024, 4), Shape(4, 1024, 4, registers=72),
    Shape(4, 1024, 4, registers=56), Shape(8, 512, 4), Shape(2, 1024, 4),
]  # fmt: skip
FEW = [Shape(64, 128, 4, stages=4, splits=splits) for splits in (1, 2, 4, 7)]
FEW += [Shape(64, 256, 4, stages=3, splits=splits) for splits in (2, 4)]
FEW += [Shape(64, 64, 4, stages=6, splits=4)]
WIDE = [Shape(64, 128, 4, stages=4), Shape(64, 64, 4, stages=6), Shape(64, 128, 4, stages=3)]


class Product:
    """Weights that rotate, and the last result."""

    def __init__(self, rows: int, outputs: int, inputs: int) -> None:
        make = {"device": "cuda", "dtype": torch.bfloat16}
        self.moved = 2.0 * (outputs * inputs + rows * (inputs + outputs))
        self.flops = 2.0 * rows * outputs * inputs
        self.weights = [
            torch.randn(outputs, inputs, **make).mul_(inputs**-0.5)
            for _ in range(copies_of(self.moved))
        ]
        self.x = torch.randn(rows, inputs, **make)
        self.out = torch.empty(0)

    def entry(self, name: str, way: str, run: Callable[[torch.Tensor], torch.Tensor]) -> Entry:
        def call(number: int) -> None:
            self.out = run(self.weights[number])

        return Entry(name, way, call, len(self.weights), self.moved, self.flops, self.check)

    def check(self) -> float:
        return relative(self.out, self.x.float() @ self.weights[0].float().t())


def entries(sweep: bool) -> Iterator[Entry]:
    for outputs, inputs in SHAPES:
        yield from single(outputs, inputs, sweep)
    for rows in (8, 32, 64):
        for outputs, inputs in SHAPES:
            yield from few(rows, outputs, inputs, sweep and outputs != VOCABULARY)


def single(outputs: int, inputs: int, sweep: bool) -> Iterator[Entry]:
    product = Product(1, outputs, inputs)
    name = f"linear 1 x {outputs} x {inputs}"
    yield product.entry(name, "cublas", lambda w: F.linear(product.x, w))
    yield product.entry(name, "table", lambda w: linear(product.x, w))
    for shape in SINGLE if sweep else ():
        way = way_of(shape)
        yield product.entry(name, way, lambda w, s=shape: linear(product.x, w, shape=s))


def few(rows: int, outputs: int, inputs: int, sweep: bool) -> Iterator[Entry]:
    product = Product(rows, outputs, inputs)
    name = f"linear {rows} x {outputs} x {inputs}"
    yield product.entry(name, "cublas", lambda w: F.linear(product.x, w))
    table = few_shape_for(outputs, inputs)
    yield product.entry(
        name, "few rows, table", lambda w: launch_few_rows(product.x, w, None, table)
    )
    for shape in (WIDE if outputs > 16384 else FEW) if sweep else ():
        yield product.entry(
            name, way_of(shape), lambda w, s=shape: launch_few_rows(product.x, w, None, s)
        )


def way_of(shape: Shape) -> str:
    """The cut in short."""
    way = f"rows {shape.rows} step {shape.step} w{shape.warps}"
    if shape.stages > 1:
        return f"{way} st{shape.stages} splits {shape.splits}"
    return f"{way} r{shape.registers}" if shape.registers else way
