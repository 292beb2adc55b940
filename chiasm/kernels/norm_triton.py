"""The kernel of `chiasm.kernels.norm`: one program a row, the row in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from chiasm.kernels.launch import overlapping


@triton.jit
def _kernel(
    x,
    delta,
    weight,
    total,
    out,
    eps,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    early: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * C
    c = tl.arange(0, BLOCK)
    inside = c < C
    w = tl.load(weight + c, mask=inside, other=0.0)
    if early:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row + c, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(delta + row + c, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row + c, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / C + eps)
    tl.store(out + row + c, w * (value * scale).to(w.dtype), mask=inside)


def launch_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """The sum (x itself when there is no delta) and the normalised rows; any leading dimensions."""
    size = weight.numel()
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    total = x if delta is None else torch.empty_like(x)
    block = triton.next_power_of_2(size)
    if rows := x.numel() // size:
        _kernel[(rows,)](
            x,
            delta if delta is None else delta.contiguous(),
            weight,
            total,
            out,
            eps,
            size,
            block,
            delta is not None,
            num_warps=min(max(block // 512, 1), 8),
            **overlapping(x),
        )
    return total, out
