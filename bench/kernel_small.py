"""Norm, gate, rotary and argmax in `bench.kernels`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from bench.kernels import Entry, copies_of, relative
from chiasm.kernels.activation import silu_and_mul
from chiasm.kernels.argmax import greedy, greedy_reference
from chiasm.kernels.draw import Filters, draw_reference, draw_tokens
from chiasm.kernels.norm import add_rms_norm
from chiasm.kernels.rotary import rotate_and_store, rotate_and_store_reference

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCABULARY = 3584, 18944, 28, 4, 128, 152064


def entries(sweep: bool) -> Iterator[Entry]:
    del sweep
    for rows in (1, 256, 8192):
        yield normed(rows)
        yield gated(rows)
        yield turned(rows)
    for rows in (1, 32, 256):
        yield from greedily(rows)
        yield at_random(rows, (0.8, 0, 0.9, 0.0), "top-p")
        yield at_random(rows, (0.8, 40, 0.9, 0.0), "top-k and top-p")
        yield at_random(rows, (0.8, 0, 1.0, 0.0), "all ids")


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def normed(rows: int) -> Entry:
    moved = 8.0 * rows * HIDDEN
    copies = copies_of(moved)
    data = [(rand(rows, HIDDEN), rand(rows, HIDDEN)) for _ in range(copies)]
    weight, outs = rand(HIDDEN), [torch.empty(0)]

    def call(number: int) -> None:
        outs[:] = add_rms_norm(*data[number], weight, eps=1e-6)

    def check() -> float:
        total = (data[0][0].double() + data[0][1].double()).bfloat16().double()
        wanted = total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
        return max(relative(outs[0], total), relative(outs[1], wanted))

    return Entry(f"add and norm {rows}", "table", call, copies, moved, check=check)


def gated(rows: int) -> Entry:
    moved = 6.0 * rows * INNER
    copies = copies_of(moved)
    data = [rand(rows, 2 * INNER) for _ in range(copies)]
    outs = [torch.empty(0)]

    def call(number: int) -> None:
        outs[0] = silu_and_mul(data[number])

    def check() -> float:
        gate, up = data[0][:64].double().chunk(2, dim=-1)
        return relative(outs[0][:64], F.silu(gate) * up)

    return Entry(f"gate {rows}", "table", call, copies, moved, check=check)


def turned(rows: int) -> Entry:
    width = (HEADS + 2 * KV_HEADS) * DIM
    moved = 4.0 * rows * width
    copies = copies_of(moved)
    data = [rand(rows, width) for _ in range(copies)]
    pages = rows // 16 + 2
    pools = torch.full((2, 2, pages, 16, KV_HEADS, DIM), 7.0, device="cuda", dtype=torch.bfloat16)
    slots = torch.randperm(pages * 16, device="cuda")[:rows]
    angle = torch.rand(rows, DIM // 2, device="cuda") * 6
    cos, sin = angle.cos(), angle.sin()
    outs = [torch.empty(0)]

    def call(number: int) -> None:
        outs[0] = rotate_and_store(data[number], cos, sin, pools[0, 0], pools[0, 1], slots)

    def check() -> float:
        wide, wanted = data[0].double(), pools[1].double().fill_(7.0)
        queries = rotate_and_store_reference(wide, cos, sin, wanted[0], wanted[1], slots)
        return max(relative(outs[0], queries), relative(pools[0], wanted))

    return Entry(f"rotary and pages {rows}", "table", call, copies, moved, check=check)


def greedily(rows: int) -> Iterator[Entry]:
    moved = 2.0 * rows * VOCABULARY
    copies = copies_of(moved)
    data = [rand(rows, VOCABULARY) for _ in range(copies)]
    masked = torch.tensor([151655, 151656, 151652, 151653], device="cuda")
    results: list[torch.Tensor] = []

    def call(number: int) -> None:
        results[:] = greedy(data[number], masked)

    def check() -> float:
        wanted = greedy_reference(data[0], masked)
        return 0.0 if all(map(torch.equal, results, wanted)) else 1.0

    yield Entry(f"argmax {rows}", "table", call, copies, moved, check=check)

    def plain(number: int) -> None:
        results[:] = [data[number].argmax(-1)]

    yield Entry(f"argmax {rows}", "torch.argmax alone", plain, copies, moved)


def at_random(rows: int, settings: tuple[float, int, float, float], name: str) -> Entry:
    moved = 4.0 * rows * VOCABULARY
    copies = copies_of(moved)
    data = [rand(rows, VOCABULARY).float() * 4 for _ in range(copies)]
    table = torch.tensor([settings] * rows, dtype=torch.float64, device="cuda").t().contiguous()
    filters, numbers = Filters(*table), torch.rand(rows, dtype=torch.float64, device="cuda")
    found = [torch.empty(0)]

    def call(number: int) -> None:
        found[0] = draw_tokens(data[number], filters, numbers)

    def check() -> float:
        wanted = draw_reference(data[0], filters, numbers)
        return 0.0 if (found[0] == wanted).float().mean() > 0.9 else 1.0

    return Entry(f"draw {rows}, {name}", "table", call, copies, moved, check=check)
