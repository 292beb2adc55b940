"""The linear layer of few rows against float64."""

from __future__ import annotations

import pytest
import torch

from chiasm.kernels.gemv import linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9])
@pytest.mark.parametrize("outputs, inputs", [(16, 64), (37, 1100), (5, 3584)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(rows, outputs, inputs, dtype, has_bias) -> None:
    torch.manual_seed(rows + outputs)
    x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype) if has_bias else None
    wanted = x.double() @ weight.double().t() + (bias.double() if bias is not None else 0)
    out = linear(x, weight, bias)
    assert out.shape == (rows, outputs) and out.dtype == dtype
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), wanted, rtol=2 * step, atol=step * inputs)
