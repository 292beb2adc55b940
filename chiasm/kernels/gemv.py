"""Linear layers of very few rows: a product that only streams the weight.

cuBLAS reads the weights of such a product at 55 to 90 % of what the memory gives, the less the
smaller they are. Here a program takes a few rows of the weight whole, all programs of a small
weight are under way at once, and their first loads begin before the input exists.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from chiasm.kernels.launch import ceil_div, compiled

FEW = 32
"""Up to so many rows of 16-bit numbers take the kernel of `few_rows_triton`."""
PROCESSORS = 132
"""Of an H100 or H200."""
WARP, REGISTERS = 32, 65536


@dataclass(frozen=True, slots=True)
class Shape:
    """How a kernel is cut."""

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


def shape_for(outputs: int) -> Shape:
    """The measured best for one row and a weight of so many rows.

    Of a small weight all programs must fit at once, or the last of them run in a GPU that is
    mostly empty: that costs a third. Registers decide how many fit.
    """
    if outputs >= 16384:
        return Shape(rows=4, step=2048, warps=8)
    a_processor = ceil_div(ceil_div(outputs, 4), PROCESSORS)
    fitting = REGISTERS // (a_processor * 4 * WARP) // 8 * 8
    if fitting < 56:
        return Shape(rows=2, step=2048, warps=4)
    return Shape(rows=4, step=1024, warps=4, registers=min(fitting, 96))


def few_shape_for(outputs: int, inputs: int) -> Shape:
    """For up to `FEW` rows and a weight [outputs, inputs]: about three programs a processor."""
    splits = min(3 * PROCESSORS // ceil_div(outputs, 64), ceil_div(inputs, 128) // 4)
    return Shape(rows=64, step=128, warps=4, stages=4, splits=max(splits, 1))


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    shape: Shape | None = None,
) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N], to [T, N]; sums in float32.

    A single row takes one kernel, up to `FEW` rows of bfloat16 or float16 on a GPU another (once
    before a graph is captured, and in one stream at a time), more take torch's own operation.
    Elements of a row of x and of the weight lie side by side. The weight is read before the kernel
    in front has ended, so that one must not be what writes it. `shape` overrides the measured cut.
    """
    if not compiled(x):
        return F.linear(x, weight, bias)
    if x.shape[0] == 1:
        from chiasm.kernels.gemv_triton import launch_gemv

        return launch_gemv(x, weight, bias, shape or shape_for(weight.shape[0]))
    if x.is_cuda and 1 < x.shape[0] <= FEW and x.element_size() == 2:
        from chiasm.kernels.few_rows_triton import launch_few_rows

        return launch_few_rows(x, weight, bias, shape or few_shape_for(*weight.shape))
    return F.linear(x, weight, bias)
