"""Linear layers whose weights have 8 bits and a scale for each block of 128 x 128.

Rows that enter are rounded to 8 bits too, with a scale for each 128 values of a row, as DeepSeek-V3
(2024) trains and public FP8 checkpoints of Qwen3-VL and GLM mean it ("dynamic" activations).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from chiasm.kernels.launch import ceil_div, compiled

BLOCK = 128
"""Values along both sides of a block."""
LARGEST = 448.0
"""Of float8_e4m3fn."""
FP8 = torch.float8_e4m3fn
LEAST_SCALE = 1e-10 / LARGEST
"""Of rows that are all zero."""


class Rounded(NamedTuple):
    """Rows in 8 bits."""

    values: torch.Tensor
    """[N, K] float8_e4m3fn"""
    scales: torch.Tensor
    """[N, K / 128] float32: what values of a block are multiplied by."""


def round_rows(x: torch.Tensor) -> Rounded:
    """[N, K] to 8 bits; K is a multiple of 128."""
    assert x.shape[1] % BLOCK == 0, "rows are whole blocks"
    if compiled(x):
        from chiasm.kernels.block_scaled_triton import launch_round_rows

        return Rounded(*launch_round_rows(x))
    blocks = x.float().unflatten(1, (-1, BLOCK))
    scales = (blocks.abs().amax(-1) / LARGEST).clamp(min=LEAST_SCALE)
    values = (blocks / scales.unsqueeze(-1)).flatten(1).to(FP8)
    return Rounded(values, scales)


def multiply_out(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[N, K] of 8 bits and their scales, one a block, to float32."""
    rows, columns = weight.shape
    spread = scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return weight.float() * spread


def block_scaled_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """[N, K] to [N, outputs] in x's dtype.

    Args:
        x: Rows; K is a multiple of 128.
        weight: [outputs, K] float8_e4m3fn.
        scales: [outputs / 128, K / 128] float32, rounded up.
        bias: [outputs].
    """
    outputs, inputs = weight.shape
    assert scales.shape == (ceil_div(outputs, BLOCK), inputs // BLOCK), "a scale for each block"
    rounded = round_rows(x)
    if compiled(x):
        from chiasm.kernels.block_scaled_triton import launch_product

        return launch_product(rounded.values, rounded.scales, weight, scales, bias, x.dtype)
    wide = rounded.values.float() * rounded.scales.repeat_interleave(BLOCK, 1)
    out = F.linear(wide, multiply_out(weight, scales))
    return (out if bias is None else out + bias.float()).to(x.dtype)
