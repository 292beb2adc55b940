"""One decoder layer of a 7B shape for one token in `bench.kernels`: what the kernels add up to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.nn.functional as F

from bench.kernel_attention import DIM, HEADS, KV_HEADS, Tokens
from bench.kernel_linear import HIDDEN, INNER, QKV
from bench.kernels import Entry
from chiasm.kernels import launch
from chiasm.kernels.activation import silu_and_mul
from chiasm.kernels.gemv import linear
from chiasm.kernels.norm import add_rms_norm, rms_norm
from chiasm.kernels.paged_decode import paged_decode
from chiasm.kernels.rotary import rotate_and_store

COPIES, LENGTH = 4, 300
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class Layer:
    """The weights of a layer."""

    def __init__(self) -> None:
        self.qkv, self.out, self.gate_up, self.down = (
            torch.randn(n, k, device="cuda", dtype=torch.bfloat16).mul_(k**-0.5)
            for n, k in ((QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))
        )
        self.bias = torch.randn(QKV, device="cuda", dtype=torch.bfloat16)
        self.norms = [torch.randn(HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(2)]


class Token:
    """One token's way through a layer."""

    def __init__(self) -> None:
        self.layers = [Layer() for _ in range(COPIES)]
        self.tokens = Tokens(torch.tensor([LENGTH]), COPIES)
        self.first = torch.randn(1, HIDDEN, device="cuda", dtype=torch.bfloat16)
        angle = torch.rand(1, DIM // 2, device="cuda") * 6
        self.angles = (angle.cos(), angle.sin())
        page = self.tokens.lookup.block_tables[0, (LENGTH - 1) // 16].long()
        self.slot = (page * 16 + (LENGTH - 1) % 16).reshape(1)
        self.result = torch.empty(0)

    def attend(self, qkv: torch.Tensor, number: int) -> torch.Tensor:
        keys, values = self.tokens.pools[number]
        queries = rotate_and_store(qkv, *self.angles, keys, values, self.slot)
        lookup, room = self.tokens.lookup, self.tokens.workspace
        return paged_decode(queries, keys, values, lookup, DIM**-0.5, room).view(1, -1)

    def through(self, number: int, product: Product) -> None:
        layer = self.layers[number]
        normed = rms_norm(self.first, layer.norms[0], eps=1e-6)
        attended = self.attend(product(normed, layer.qkv, layer.bias), number)
        total, normed = add_rms_norm(
            self.first, product(attended, layer.out, None), layer.norms[1], eps=1e-6
        )
        inner = silu_and_mul(product(normed, layer.gate_up, None))
        self.result = total + product(inner, layer.down, None)

    def by_kernels(self, number: int) -> None:
        self.through(number, linear)

    def by_cublas(self, number: int) -> None:
        self.through(number, F.linear)

    def in_turn(self, number: int) -> None:
        """Without programmatic dependent launch."""
        with mock.patch.object(launch, "capability", lambda _: 8):
            self.by_kernels(number)

    def check(self) -> float:
        """Against cuBLAS."""
        out = self.result.clone()
        self.by_cublas(0)
        delta = self.result.double() - self.first.double()
        return float((out.double() - self.result.double()).norm() / delta.norm())


def entries(sweep: bool) -> Iterator[Entry]:
    del sweep
    token = Token()
    moved = 2.0 * (HIDDEN * (QKV + HEADS * DIM + 3 * INNER)) + 4.0 * LENGTH * KV_HEADS * DIM
    name = "layer of one token"
    yield Entry(name, "cublas", token.by_cublas, COPIES, moved)
    yield Entry(name, "kernels, one after another", token.in_turn, COPIES, moved)
    yield Entry(name, "kernels, overlapping", token.by_kernels, COPIES, moved, check=token.check)
