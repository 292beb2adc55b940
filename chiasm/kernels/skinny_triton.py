"""The product of up to 64 rows of `chiasm.kernels.gemv`: the weight streams past tensor cores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from chiasm.kernels.gemv import Shape
from chiasm.kernels.launch import ceil_div, overlapping, power_of_two


def launch_skinny(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, shape: Shape
) -> torch.Tensor:
    """See `chiasm.kernels.gemv.linear`."""
    tokens, (outputs, inputs) = x.shape[0], weight.shape
    out = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device)
    # fmt: off
    _skinny[(ceil_div(outputs, shape.rows),)](
        x, weight, bias, out, tokens, outputs, x.stride(0), weight.stride(0),
        inputs=inputs, has_bias=bias is not None, block_tokens=max(power_of_two(tokens), 16),
        rows=shape.rows, step=shape.step, stages=shape.stages, num_warps=shape.warps,
        **overlapping(x),
    )
    # fmt: on
    return out


@triton.jit
def _skinny(
    x,
    weight,
    bias,
    out,
    tokens,
    outputs,
    x_stride,
    stride,
    inputs: tl.constexpr,
    has_bias: tl.constexpr,
    block_tokens: tl.constexpr,
    rows: tl.constexpr,
    step: tl.constexpr,
    stages: tl.constexpr,
    early: tl.constexpr,
):
    """Output transposed: rows of the weight are the tall side of the tensor cores' product."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    token = tl.arange(0, block_tokens)
    column = tl.arange(0, step)
    source = weight + (row % outputs).to(tl.int64)[:, None] * stride + column[None, :]
    given = x + token[:, None] * x_stride + column[None, :]
    real = (token < tokens)[:, None]
    if early:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros((rows, block_tokens), tl.float32)
    for start in tl.range(0, inputs, step, num_stages=stages):
        if inputs % step == 0:
            w = tl.load(source + start)
            g = tl.load(given + start, mask=real, other=0.0)
        else:
            inside = (start + column < inputs)[None, :]
            w = tl.load(source + start, mask=inside, other=0.0)
            g = tl.load(given + start, mask=real & inside, other=0.0)
        total = tl.dot(w, tl.trans(g), total)
    if has_bias:
        total += tl.load(bias + row, mask=row < outputs, other=0.0).to(tl.float32)[:, None]
    target = out + token[None, :] * outputs + row[:, None]
    known = (row < outputs)[:, None] & (token < tokens)[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=known)
