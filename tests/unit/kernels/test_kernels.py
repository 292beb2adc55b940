"""Fused operations against torch's own, where there is no GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from chiasm.kernels.activation import silu_and_mul
from chiasm.kernels.norm import add_rms_norm, rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_and_addition(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, delta = torch.randn(7, 96, dtype=dtype), torch.randn(7, 96, dtype=dtype)
    weight = torch.randn(96, dtype=dtype)
    total, normed = add_rms_norm(x, delta, weight, eps=1e-6)
    assert torch.equal(total, x + delta)
    assert torch.equal(normed, rms_norm(total, weight, eps=1e-6))
    expected = F.rms_norm(total.float(), (96,), weight.float(), 1e-6)
    torch.testing.assert_close(normed.float(), expected, atol=1e-5, rtol=2e-2)


def test_a_wide_residual_keeps_its_width() -> None:
    """A float16 tower: the stream is float32, what is added and what comes out are float16."""
    x = torch.full((2, 8), 70000.0)
    total, normed = add_rms_norm(x, torch.ones(2, 8).half(), torch.ones(8).half(), eps=1e-6)
    assert total.dtype is torch.float32 and torch.equal(total, x + 1)
    assert normed.dtype is torch.float16 and torch.equal(normed, torch.ones(2, 8).half())


def test_gate() -> None:
    torch.manual_seed(2)
    joined = torch.randn(5, 20)
    expected = F.silu(joined[:, :10]) * joined[:, 10:]
    assert torch.equal(silu_and_mul(joined), expected)
    wide = silu_and_mul((joined * 300).half(), dtype=torch.float32)
    assert wide.dtype is torch.float32 and wide.abs().max() > 65504
