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
        adds=residual is not None, rows=shape.rows, step=shape.step, num_warps=shape.warps,
        **overlapping(x),
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
    _gated_gemv[(ceil_div(outputs, shape.rows),)](
        x, weight, norm.weight if norm else None, out, outputs, weight.stride(0),
        norm.eps if norm else 0.0,
        inputs=inputs, has_norm=norm is not None, rows=shape.rows, step=shape.step,
        num_warps=shape.warps, **overlapping(x),
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
    rows: tl.constexpr,
    step: tl.constexpr,
    early: tl.constexpr,
):
    """Loads run one step ahead of the sums; the first does not wait for x."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.arange(0, step)
    known = row < outputs
    source = weight + row.to(tl.int64)[:, None] * stride + column[None, :]
    w = tl.load(source, mask=known[:, None] & (column < inputs)[None, :], other=0.0)
    if early:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros((rows, step), tl.float32)
    squares = tl.zeros((step,), tl.float32)
    for start in tl.range(0, inputs, step):
        here = start + column
        ahead = known[:, None] & (here + step < inputs)[None, :]
        following = tl.load(source + start + step, mask=ahead, other=0.0)
        given = tl.load(x + here, mask=here < inputs, other=0.0).to(tl.float32)
        if has_norm:
            squares += given * given
            given *= tl.load(norm + here, mask=here < inputs, other=0.0).to(tl.float32)
        total += w.to(tl.float32) * given[None, :]
        w = following
    result = tl.sum(total, 1)
    if has_norm:
        result *= tl.rsqrt(tl.sum(squares, 0) / inputs + eps)
    if has_bias:
        result += tl.load(bias + row, mask=known, other=0.0).to(tl.float32)
    if adds:
        result += tl.load(out + row, mask=known, other=0.0).to(tl.float32)
    tl.store(out + row, result, mask=known)


@triton.jit
def _gated_gemv(
    x,
    weight,
    norm,
    out,
    outputs,
    stride,
    eps,
    inputs: tl.constexpr,
    has_norm: tl.constexpr,
    rows: tl.constexpr,
    step: tl.constexpr,
    early: tl.constexpr,
):
    """Row i of the gate and row i of up in one program."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.arange(0, step)
    known = row < outputs
    source = weight + row.to(tl.int64)[:, None] * stride + column[None, :]
    upper = source + outputs.to(tl.int64) * stride
    begins = known[:, None] & (column < inputs)[None, :]
    g = tl.load(source, mask=begins, other=0.0)
    u = tl.load(upper, mask=begins, other=0.0)
    if early:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.zeros((rows, step), tl.float32)
    up = tl.zeros((rows, step), tl.float32)
    squares = tl.zeros((step,), tl.float32)
    for start in tl.range(0, inputs, step):
        here = start + column
        ahead = known[:, None] & (here + step < inputs)[None, :]
        next_g = tl.load(source + start + step, mask=ahead, other=0.0)
        next_u = tl.load(upper + start + step, mask=ahead, other=0.0)
        given = tl.load(x + here, mask=here < inputs, other=0.0).to(tl.float32)
        if has_norm:
            squares += given * given
            given *= tl.load(norm + here, mask=here < inputs, other=0.0).to(tl.float32)
        gate += g.to(tl.float32) * given[None, :]
        up += u.to(tl.float32) * given[None, :]
        g, u = next_g, next_u
    scale = 1.0
    if has_norm:
        scale = tl.rsqrt(tl.sum(squares, 0) / inputs + eps)
    opened = tl.sum(gate, 1) * scale
    result = opened * tl.sigmoid(opened) * (tl.sum(up, 1) * scale)
    tl.store(out + row, result, mask=known)
