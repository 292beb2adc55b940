"""The kernel of `chiasm.kernels.gemv` for one row: a program takes rows of the weight whole."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from chiasm.kernels.gemv import Shape
from chiasm.kernels.launch import ceil_div, overlapping


def launch_gemv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, shape: Shape
) -> torch.Tensor:
    """See `chiasm.kernels.gemv.linear`."""
    outputs, inputs = weight.shape
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    # fmt: off
    _gemv[(ceil_div(outputs, shape.rows),)](
        x, weight, bias, out, outputs, weight.stride(0),
        inputs=inputs, has_bias=bias is not None, rows=shape.rows, step=shape.step,
        num_warps=shape.warps, maxnreg=shape.registers, **overlapping(x),
    )
    # fmt: on
    return out


@triton.jit
def _gemv(
    x,
    weight,
    bias,
    out,
    outputs,
    stride,
    inputs: tl.constexpr,
    has_bias: tl.constexpr,
    rows: tl.constexpr,
    step: tl.constexpr,
    early: tl.constexpr,
):
    """Loads run one step ahead of the sums; the first does not wait for x.

    A thread adds up the eight products of a 16-byte load at once, so that sums take few registers
    and more programs fit.
    """
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.arange(0, step)
    taken = tl.minimum(row, outputs - 1)
    source = weight + taken.to(tl.int64)[:, None] * stride + column[None, :]
    w = tl.load(source, mask=(column < inputs)[None, :], other=0.0)
    if early:
        gdc_launch_dependents()
        gdc_wait()
    g = tl.load(x + column, mask=column < inputs, other=0.0)
    total = tl.zeros((rows, step // 8), tl.float32)
    for start in tl.static_range(0, inputs, step):
        product = w.to(tl.float32) * g.to(tl.float32)[None, :]
        if start + step < inputs:
            if start + 2 * step <= inputs:
                w = tl.load(source + start + step)
                g = tl.load(x + start + step + column)
            else:
                inside = start + step + column < inputs
                w = tl.load(source + start + step, mask=inside[None, :], other=0.0)
                g = tl.load(x + start + step + column, mask=inside, other=0.0)
        total += tl.sum(tl.reshape(product, (rows, step // 8, 8)), 2)
    result = tl.sum(total, 1)
    if has_bias:
        result += tl.load(bias + taken).to(tl.float32)
    tl.store(out + row, result, mask=row < outputs)
