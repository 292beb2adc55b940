"""The linear layer of few rows against float64."""

from __future__ import annotations

import pytest
import torch

from chiasm.kernels.gemv import Shape, linear, shape_for
from chiasm.kernels.launch import INTERPRETED

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


@pytest.mark.parametrize("outputs", [8, 1792, 2304, 3584, 4608, 8192])
def test_programs_of_a_small_weight_fit_at_once(outputs) -> None:
    shape = shape_for(outputs)
    programs, threads = -(-outputs // shape.rows), shape.warps * 32
    assert shape.registers is None or programs <= 132 * (65536 // (shape.registers * threads))
