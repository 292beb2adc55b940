"""Linear layers of very few rows: a product that only streams the weight.

cuBLAS reads the weights of such a product at about 80 % of what the memory gives, and leaves a gap
before and after. Here a program takes a few rows of the weight whole, its first loads begin
before its input exists, and what stands before and after the product in a layer (norm, gate,
residual) happens where the numbers are anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from chiasm.kernels.activation import silu_and_mul
from chiasm.kernels.launch import HAS_TRITON, compiled
from chiasm.kernels.norm import rms_norm

FEW = 1
PROGRAMS = 396
"""Three for each of 132 multiprocessors."""


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm before the product."""

    weight: torch.Tensor
    """[K]."""
    eps: float


@dataclass(frozen=True, slots=True)
class Shape:
    """How the kernel is cut."""

    rows: int
    """Rows of the weight that one program takes."""
    step: int
    """Columns that one step of the loop takes."""
    warps: int
    registers: int | None = None
    """The most a thread may use, so that more programs fit; None: as many as the compiler likes."""
    stages: int = 1
    """Steps whose loads are under way at once, where tensor cores do the sums."""
    splits: int = 1
    """Programs that share the columns of a tile, where tensor cores do the sums."""


def shape_for(outputs: int, inputs: int) -> Shape:
    """The measured best for one row and a weight [outputs, inputs]."""
    del outputs
    if inputs <= 8192:
        return Shape(rows=4, step=2048, warps=8)
    return Shape(rows=4, step=1024, warps=4)


def few_shape_for(outputs: int, inputs: int) -> Shape:
    """The measured best for up to `FEW` rows and a weight [outputs, inputs]."""
    tiles = -(-outputs // 64)
    steps = -(-inputs // 128)
    splits = max(min(PROGRAMS // tiles, steps // 4), 1)
    return Shape(rows=64, step=128, warps=4, stages=4, splits=splits)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    shape: Shape | None = None,
) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N], to [T, N]; sums in float32.

    `norm` is applied to x first. With `residual` [T, N] the result is added to it in place and it
    is what is returned. A single row takes one kernel, up to `FEW` rows of bfloat16 or float16 on
    a GPU another (once before a graph is captured, and in one stream at a time), more take torch's
    own operations. Elements of a row of x and of the weight lie side by side.
    """
    if compiled(x) and x.shape[0] == 1:
        from chiasm.kernels.gemv_triton import launch_gemv

        shape = shape or shape_for(*weight.shape)
        return launch_gemv(x, weight, bias, norm, residual, shape)
    if HAS_TRITON and x.is_cuda and 1 < x.shape[0] <= FEW and x.element_size() == 2:
        from chiasm.kernels.few_rows_triton import launch_few_rows

        if norm is not None:
            x = rms_norm(x, norm.weight, eps=norm.eps)
        out = launch_few_rows(x, weight, bias, shape or few_shape_for(*weight.shape))
        return out if residual is None else residual.add_(out)
    return linear_reference(x, weight, bias, norm, residual)


def gated_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm: Norm | None = None,
    shape: Shape | None = None,
) -> torch.Tensor:
    """silu(x gate^T) x (x up^T) for weight [2 I, K] = gate over up: [T, K] to [T, I].

    As `linear` with the gate of a SwiGLU layer behind it.
    """
    if compiled(x) and x.shape[0] == 1:
        from chiasm.kernels.gemv_triton import launch_gated_gemv

        outputs, inputs = weight.shape[0] // 2, weight.shape[1]
        shape = shape or shape_for(outputs, inputs)
        return launch_gated_gemv(x, weight, norm, shape)
    return silu_and_mul(linear(x, weight, norm=norm))


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`linear` in torch's own operations."""
    if norm is not None:
        x = rms_norm(x, norm.weight, eps=norm.eps)
    out = F.linear(x, weight, bias)
    return out if residual is None else residual.add_(out)
