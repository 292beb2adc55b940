"""Linear layers of few rows in `bench.kernels`: the shapes of a 7B decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from bench.kernels import Entry, copies_of, relative
from chiasm.kernels.gemv import Norm, Shape, gated_linear, linear
from chiasm.kernels.skinny_triton import launch_skinny

HIDDEN, INNER, QKV, VOCABULARY = 3584, 18944, 4608, 152064
SHAPES = [
    (QKV, HIDDEN),
    (HIDDEN, HIDDEN),
    (2 * INNER, HIDDEN),
    (HIDDEN, INNER),
    (VOCABULARY, HIDDEN),
]
SINGLE = [
    Shape(2, 1024, 4), Shape(4, 1024, 4), Shape(8, 1024, 4), Shape(4, 512, 4), Shape(8, 512, 4),
    Shape(16, 512, 8), Shape(4, 512, 2), Shape(2, 2048, 4), Shape(4, 2048, 8),
]  # fmt: skip
GATED = [Shape(2, 512, 4), Shape(4, 512, 4), Shape(2, 1024, 4), Shape(4, 1024, 8), Shape(4, 512, 2)]
FEW = [
    Shape(32, 256, 4, 4), Shape(64, 128, 4, 4), Shape(64, 256, 4, 3), Shape(128, 128, 4, 3),
    Shape(64, 64, 4, 6), Shape(128, 64, 8, 5),
]  # fmt: skip


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
        self.norm = Norm(torch.randn(inputs, **make), 1e-6)
        self.residual = torch.randn(rows, outputs, **make)
        self.out = torch.empty(0)

    def entry(
        self, name: str, way: str, run: Callable[[torch.Tensor], torch.Tensor], kind: str = ""
    ) -> Entry:
        def call(number: int) -> None:
            self.out = run(self.weights[number])

        def check() -> float:
            return relative(self.out, self.wanted(kind))

        copies = len(self.weights)
        checks = None if kind == "adds" else check
        return Entry(name, way, call, copies, self.moved, self.flops, checks)

    def wanted(self, kind: str) -> torch.Tensor:
        x = self.x.float()
        if kind == "gated":
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.norm.weight
        out = x @ self.weights[0].float().t()
        if kind == "gated":
            gate, up = out.chunk(2, dim=-1)
            out = F.silu(gate) * up
        return out


def entries(sweep: bool) -> Iterator[Entry]:
    for outputs, inputs in SHAPES:
        yield from single(outputs, inputs, sweep)
    for rows in (8, 32, 64):
        for outputs, inputs in SHAPES[:4]:
            yield from few(rows, outputs, inputs, sweep)


def single(outputs: int, inputs: int, sweep: bool) -> Iterator[Entry]:
    product = Product(1, outputs, inputs)
    name = f"linear 1 x {outputs} x {inputs}"
    yield product.entry(name, "cublas", lambda w: F.linear(product.x, w))
    yield product.entry(name, "table", lambda w: linear(product.x, w))
    for shape in SINGLE if sweep else ():
        way = f"rows {shape.rows} step {shape.step} w{shape.warps}"
        yield product.entry(name, way, lambda w, s=shape: linear(product.x, w, shape=s))
    if outputs == 2 * INNER:
        name = f"gated 1 x {outputs} x {inputs}"
        for shape in (None, *(GATED if sweep else ())):
            way = f"rows {shape.rows} step {shape.step} w{shape.warps}" if shape else "table"
            yield product.entry(
                name, way, lambda w, s=shape: gated_linear(product.x, w, product.norm, s), "gated"
            )
    if outputs == HIDDEN:
        yield product.entry(
            name,
            "table, residual",
            lambda w: linear(product.x, w, residual=product.residual),
            "adds",
        )


def few(rows: int, outputs: int, inputs: int, sweep: bool) -> Iterator[Entry]:
    product = Product(rows, outputs, inputs)
    name = f"linear {rows} x {outputs} x {inputs}"
    yield product.entry(name, "cublas", lambda w: F.linear(product.x, w))
    for shape in (FEW if rows > 8 else FEW[:3]) if sweep else ():
        way = f"rows {shape.rows} step {shape.step} w{shape.warps} st{shape.stages}"
        yield product.entry(name, way, lambda w, s=shape: launch_skinny(product.x, w, None, s))
