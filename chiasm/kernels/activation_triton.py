"""The kernel of `chiasm.kernels.activation`: one program a row and a block of columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from chiasm.kernels.launch import overlapping

_BLOCK = 4096


@triton.jit
def _kernel(
    gate_up,
    bias,
    out,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    early: tl.constexpr,
):
    if early:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < F
    gate = tl.load(gate_up + row * 2 * F + c, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * F + F + c, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        gate += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias + F + c, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out + row * F + c, value.to(out.dtype.element_ty), mask=inside)


def launch_silu_and_mul(gate_up: Tensor, bias: Tensor | None, *, dtype: torch.dtype) -> Tensor:
    """[..., 2F] to [..., F]."""
    size = gate_up.shape[-1] // 2
    gate_up = gate_up.contiguous()
    out = torch.empty((*gate_up.shape[:-1], size), dtype=dtype, device=gate_up.device)
    block = min(_BLOCK, triton.next_power_of_2(size))
    if rows := gate_up.numel() // (2 * size):
        grid = (rows, triton.cdiv(size, block))
        _kernel[grid](
            gate_up,
            bias,
            out,
            size,
            block,
            bias is not None,
            num_warps=8 if block >= 2048 else 4,
            **overlapping(gate_up),
        )
    return out
