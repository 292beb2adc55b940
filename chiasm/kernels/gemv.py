"""Linear layers of very few rows: a product that only streams the weight.

cuBLAS reads the weights of such a product at about 80 % of what the memory gives; one wide read
per thread, many in flight and nothing else comes closer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from chiasm.kernels.language import Pointer, Scalar, ceil_div, compiled, constexpr, jit, tl


@dataclass(frozen=True, slots=True)
class Shape:
    """How the kernel is cut."""

    rows: int
    """Rows of the weight that one program takes."""
    step: int
    """Columns that one step of the loop takes."""
    warps: int


def shape_for(outputs: int, inputs: int) -> Shape:
    """The measured best for a weight [outputs, inputs]."""
    del inputs
    if outputs >= 16384:
        return Shape(rows=8, step=512, warps=4)
    return Shape(rows=4, step=1024, warps=4)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    shape: Shape | None = None,
) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N], to [T, N]; sums in float32.

    A single row takes the kernel, more take `torch.nn.functional.linear`.
    """
    if not compiled(x) or x.shape[0] != 1:
        return F.linear(x, weight, bias)
    outputs, inputs = weight.shape
    shape = shape or shape_for(outputs, inputs)
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    # fmt: off
    _gemv[(ceil_div(outputs, shape.rows),)](
        x, weight, weight if bias is None else bias, out, outputs, weight.stride(0),
        inputs=inputs, has_bias=bias is not None, rows=shape.rows, step=shape.step,
        num_warps=shape.warps,
    )
    # fmt: on
    return out


@jit
def _gemv(
    x: Pointer,
    weight: Pointer,
    bias: Pointer,
    out: Pointer,
    outputs: Scalar,
    stride: Scalar,
    inputs: constexpr,
    has_bias: constexpr,
    rows: constexpr,
    step: constexpr,
) -> None:
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.arange(0, step)
    known = row < outputs
    base = weight + row.to(tl.int64)[:, None] * stride
    total = tl.zeros((rows, step), tl.float32)
    for start in tl.range(0, inputs, step):
        here = start + column
        inside = here < inputs
        given = tl.load(x + here, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(base + here[None, :], mask=known[:, None] & inside[None, :], other=0.0)
        total += w.to(tl.float32) * given[None, :]
    result = tl.sum(total, 1)
    if has_bias:
        result += tl.load(bias + row, mask=known, other=0.0).to(tl.float32)
    tl.store(out + row, result, mask=known)
