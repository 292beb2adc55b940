"""The kernels of `chiasm.kernels.gemv`: a program takes a few rows of the weight whole."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from chiasm.kernels.gemv import Norm, Shape
from chiasm.kernels.launch import ceil_div, overlapping


def launch_gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: Norm | None,
    residual: torch.Tensor | None,
    shape: Shape,
) -> torch.Tensor:
    """See `chiasm.kernels.gemv.linear`."""
    outputs, inputs = weight.shape
    out = residual
    if out is None:
        out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    # fmt: off
    _gemv[(ceil_div(outputs, shape.rows),)](
        x, weight, bias, norm.weight if norm else None, out, outputs, weight.stride(0),
        norm.eps if norm else 0.0,
        inputs=inputs, has_bias=bias is not None, has_norm=norm is not None,
        adds=residual is not None, gated=False, rows=shape.rows, step=shape.step,
        num_warps=shape.warps,
        maxnreg=shape.registers, **overlapping(x),
    )
    # fmt: on
    return out


def launch_gated_gemv(
    x: torch.Tensor, weight: torch.Tensor, norm: Norm | None, shape: Shape
) -> torch.Tensor:
    """See `chiasm.kernels.gemv.gated_linear`."""
    outputs, inputs = weight.shape[0] // 2, weight.shape[1]
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    # fmt: off
    _gemv[(ceil_div(outputs, shape.rows // 2),)](
        x, weight, None, norm.weight if norm else None, out, outputs, weight.stride(0),
        norm.eps if norm else 0.0,
        inputs=inputs, has_bias=False, has_norm=norm is not None, adds=False, gated=True,
        rows=shape.rows, step=shape.step, num_warps=shape.warps,
        maxnreg=shape.registers, **overlapping(x),
    )
    # fmt: on
    return out


@triton.jit
def _gemv(
    x,
    weight,
    bias,
    norm,
    out,
    outputs,
    stride,
    eps,
    inputs: tl.constexpr,
    has_bias: tl.constexpr,
    has_norm: tl.constexpr,
    adds: tl.constexpr,
    gated: tl.constexpr,
    rows: tl.constexpr,
    step: tl.constexpr,
    early: tl.constexpr,
):
    """Loads run one step ahead of the sums; the first does not wait for x.

    A thread adds up the eight products of a 16-byte load at once, so that sums take few registers
    and more programs fit. Gated: rows 2i and 2i + 1 of a tile are row i of the gate and of up.
    """
    lane = tl.arange(0, rows)
    column = tl.arange(0, step)
    if gated:
        row = tl.program_id(0) * (rows // 2) + lane // 2
        taken = tl.minimum(row, outputs - 1) + (lane % 2) * outputs
    else:
        row = tl.program_id(0) * rows + lane
        taken = tl.minimum(row, outputs - 1)
    source = weight + taken.to(tl.int64)[:, None] * stride + column[None, :]
    w = tl.load(source, mask=(column < inputs)[None, :], other=0.0)
    if early:
        gdc_launch_dependents()
        gdc_wait()
    g = tl.load(x + column, mask=column < inputs, other=0.0)
    total = tl.zeros((rows, step // 8), tl.float32)
    squares = tl.zeros((step // 8,), tl.float32)
    for start in tl.static_range(0, inputs, step):
        given = g.to(tl.float32)
        wide = w.to(tl.float32)
        if has_norm:
            squares += tl.sum(tl.reshape(given * given, (step // 8, 8)), 1)
            inside = start + column < inputs
            given *= tl.load(norm + start + column, mask=inside, other=0.0).to(tl.float32)
        if start + step < inputs:
            if start + 2 * step <= inputs:
                w = tl.load(source + start + step)
                g = tl.load(x + start + step + column)
            else:
                inside = start + step + column < inputs
                w = tl.load(source + start + step, mask=inside[None, :], other=0.0)
                g = tl.load(x + start + step + column, mask=inside, other=0.0)
        total += tl.sum(tl.reshape(wide * given[None, :], (rows, step // 8, 8)), 2)
    result = tl.sum(total, 1)
    if has_norm:
        result *= tl.rsqrt(tl.sum(squares, 0) / inputs + eps)
    if gated:
        gate, up = tl.split(tl.reshape(result, (rows // 2, 2)))
        target = tl.program_id(0) * (rows // 2) + tl.arange(0, rows // 2)
        tl.store(out + target, gate * tl.sigmoid(gate) * up, mask=target < outputs)
    else:
        if has_bias:
            result += tl.load(bias + taken).to(tl.float32)
        if adds:
            result += tl.load(out + taken).to(tl.float32)
        tl.store(out + row, result, mask=row < outputs)
