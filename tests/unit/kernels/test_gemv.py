"""The linear layer of few rows against float64."""

from __future__ import annotations

import pytest
import torch

from chiasm.kernels.gemv import Norm, Shape, gated_linear, linear
from chiasm.kernels.launch import INTERPRETED
from chiasm.kernels.norm import rms_norm

# Triton's interpreter on NumPy 1.25 and later.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


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


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("outputs, inputs", [(37, 1100), (8, 512)])
def test_norm_before_and_residual_after(rows, outputs, inputs) -> None:
    torch.manual_seed(outputs)
    x, weight = torch.randn(rows, inputs) * 3, torch.randn(outputs, inputs)
    norm = Norm(torch.randn(inputs), 1e-5)
    residual = torch.randn(rows, outputs)
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    wanted = normed @ weight.double().t() + residual.double()
    out = linear(x, weight, norm=norm, residual=residual)
    assert out.data_ptr() == residual.data_ptr()
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("has_norm", [False, True])
def test_gated_linear(rows, has_norm) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, 700), torch.randn(2 * 21, 700) / 20
    norm = Norm(torch.randn(700), 1e-5) if has_norm else None
    given = rms_norm(x, norm.weight, norm.eps) if norm else x
    gate, up = (given.double() @ weight.double().t()).chunk(2, dim=-1)
    out = gated_linear(x, weight, norm)
    torch.testing.assert_close(out.double(), gate * gate.sigmoid() * up, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton, and TRITON_INTERPRET=1")
@pytest.mark.parametrize("rows, splits", [(2, 1), (5, 3), (20, 2), (64, 4)])
@pytest.mark.parametrize("outputs, inputs", [(37, 512), (130, 700)])
def test_few_rows(rows, splits, outputs, inputs) -> None:
    from chiasm.kernels.few_rows_triton import launch_few_rows, room

    torch.manual_seed(rows)
    x, weight = torch.randn(rows, inputs).half(), torch.randn(outputs, inputs).half()
    bias = torch.randn(outputs).half()
    wanted = x.double() @ weight.double().t() + bias.double()
    shape = Shape(rows=64, step=64, warps=4, stages=2, splits=splits)
    out = launch_few_rows(x, weight, bias, shape)
    torch.testing.assert_close(out.double(), wanted, rtol=2e-3, atol=5e-2)
    assert not room(x.device)[1].any()
