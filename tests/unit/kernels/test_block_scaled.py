"""Products of 8-bit blocks against what they mean, in plain torch and line by line in Triton."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from chiasm.kernels.block_scaled import (
    FP8,
    LARGEST,
    block_scaled_linear,
    multiply_out,
    round_rows,
)
from chiasm.kernels.launch import INTERPRETED

# Triton's interpreter on NumPy 1.25 and later.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


def drawn(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and scales that differ widely from block to block."""
    weight = (torch.rand(outputs, inputs) * 2 - 1).mul(LARGEST).to(FP8)
    scales = torch.rand(-(-outputs // 128), inputs // 128).add(0.1).pow(3) / LARGEST
    return weight, scales


@pytest.mark.skipif(INTERPRETED, reason="the interpreter cuts to 8 bits, a GPU rounds")
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_rows_are_rounded_block_by_block(rows: int) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, 384) * torch.tensor([1.0, 1e-3, 100.0]).repeat_interleave(128)
    x[0, :128] = 0
    values, scales = round_rows(x)
    assert values.dtype is FP8 and scales.shape == (rows, 3)
    back = values.float() * scales.repeat_interleave(128, 1)
    # Three bits of mantissa: half a step is a sixteenth.
    largest = x.unflatten(1, (3, 128)).abs().amax(-1).repeat_interleave(128, 1)
    assert ((back - x).abs() <= x.abs() / 16 + largest / 2**13).all()
    assert not back[0, :128].any()
    full = values.float().unflatten(1, (3, 128)).abs().amax(-1)
    assert (full.flatten()[1:] == LARGEST).all()


@pytest.mark.parametrize("rows", [1, 7, 33])
@pytest.mark.parametrize("outputs, inputs", [(256, 128), (200, 384), (130, 256)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_what_was_rounded(
    rows: int, outputs: int, inputs: int, has_bias: bool
) -> None:
    torch.manual_seed(rows + outputs)
    x = torch.randn(rows, inputs).bfloat16()
    weight, scales = drawn(outputs, inputs)
    bias = torch.randn(outputs).bfloat16() if has_bias else None
    values, row_scales = round_rows(x)
    wide = values.double() * row_scales.double().repeat_interleave(128, 1)
    wanted = wide @ multiply_out(weight, scales).double().t()
    wanted = wanted if bias is None else wanted + bias.double()
    out = block_scaled_linear(x, weight, scales, bias)
    assert out.dtype is torch.bfloat16 and out.shape == (rows, outputs)
    torch.testing.assert_close(out.double(), wanted, rtol=2**-7, atol=2e-2)
    if not INTERPRETED:
        plain = wide_product(x, weight, scales, bias)
        assert F.cosine_similarity(out.float(), plain).min() > 0.999


def wide_product(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Of rows as they are."""
    return F.linear(x.float(), multiply_out(weight, scales), None if bias is None else bias.float())
