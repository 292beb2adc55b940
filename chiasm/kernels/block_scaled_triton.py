"""The kernels of `chiasm.kernels.block_scaled`: sums of a block in 8 bits, scaled in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 128
_LARGEST = 448.0
_LEAST = 1e-10 / _LARGEST
_FP8 = torch.float8_e4m3fn


@triton.jit
def _round(x, values, scales, K, LARGEST: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * K + k).to(tl.float32)
    # Rounded as IEEE says: a plain `/` is the GPU's fast one, and ends beside the host's.
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(value), 0), LARGEST), LEAST)
    tl.store(values + row * K + k, tl.div_rn(value, scale).to(values.dtype.element_ty))
    tl.store(scales + row * (K // BLOCK) + block, scale)


@triton.jit
def _product(
    x, x_scales, weight, scales, bias, out, rows, outputs, K,
    BIAS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Programs that share rows of the weight follow each other: they find them in the cache.
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, BLOCK)
    blocks = K // BLOCK
    at_x = x + m.to(tl.int64)[:, None] * K + k[None, :]
    at_weight = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    own_scales = scales + (tl.program_id(1) * OUTPUTS // BLOCK) * blocks
    live_m, live_n = m < rows, n < outputs
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for block in range(0, blocks):
        a = tl.load(at_x + block * BLOCK, mask=live_m[:, None], other=0.0)
        b = tl.load(at_weight + block * BLOCK, mask=live_n[:, None], other=0.0)
        a_scale = tl.load(x_scales + m * blocks + block, mask=live_m, other=0.0)
        b_scale = tl.load(own_scales + block)
        total += tl.dot(a, tl.trans(b)) * (a_scale * b_scale)[:, None]
    if BIAS:
        total += tl.load(bias + n, mask=live_n, other=0.0).to(tl.float32)[None, :]
    at_out = out + m.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(at_out, total.to(out.dtype.element_ty), mask=live_m[:, None] & live_n[None, :])


def launch_round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] to values of 8 bits and scales [N, K / 128]."""
    x = x.contiguous()
    rows, inputs = x.shape
    values = torch.empty(rows, inputs, dtype=_FP8, device=x.device)
    scales = torch.empty(rows, inputs // _BLOCK, dtype=torch.float32, device=x.device)
    if rows:
        grid = (rows, inputs // _BLOCK)
        _round[grid](x, values, scales, inputs, _LARGEST, _LEAST, _BLOCK, num_warps=1)
    return values, scales


def launch_product(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """[N, K] and [outputs, K] of 8 bits to [N, outputs]."""
    rows, inputs = x.shape
    outputs = len(weight)
    out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    if not rows:
        return out
    tall, wide, warps, stages = _shape(rows, outputs)
    grid = (triton.cdiv(rows, tall), triton.cdiv(outputs, wide))
    _product[grid](
        x, x_scales, weight, scales.contiguous(), bias, out, rows, outputs, inputs,
        bias is not None, tall, wide, _BLOCK,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def _shape(rows: int, outputs: int) -> tuple[int, int, int, int]:
    """Rows, outputs, warps and stages of a program: few rows want many programs."""
    if rows <= 32:
        return (16 if rows <= 16 else 32), (32 if outputs <= 8192 else 64), 4, 4
    if rows <= 256:
        return 64, 64, 4, 4
    return 128, 128, 8, 3
