"""Gated feed-forward block of vision towers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chiasm.kernels.activation import silu_and_mul

_ALIGNED = 16
"""Columns of the inner width: a GPU's matrix units want rows that begin on 16-byte borders."""


class GatedMLP(nn.Module):
    """SwiGLU (Shazeer 2020), with biases or without.

    The product of gate and up can pass 65504, so a float16 tower keeps `down_proj` in float32 and
    everything from the product on is computed in that dtype.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = True) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def finish(self) -> None:
        """Joins gate and up into one matrix and widens the block with zeros to an aligned width.

        A padded column is silu(0) * 0 times zero weights: the result is the same. Qwen2.5-VL's 3420
        is such a width: its down projection runs 3.5 times as fast as 3424 wide (H200, bfloat16).
        """
        pad = -self.gate_proj.out_features % _ALIGNED
        halves = (self.gate_proj, self.up_proj)
        weight = torch.cat([F.pad(half.weight, (0, 0, 0, pad)) for half in halves])
        biases = [F.pad(half.bias, (0, pad)) for half in halves if half.bias is not None]
        bias = torch.cat(biases) if biases else None
        self.gate_up_proj = _linear(weight, bias)
        self.down_proj = _linear(F.pad(self.down_proj.weight, (0, pad)), self.down_proj.bias)
        del self.gate_proj, self.up_proj

    def forward(self, x: Tensor) -> Tensor:
        """Returns `down_proj`'s dtype. After `finish`."""
        out: Tensor = self.down_proj(self._inner(x))
        return out

    def _inner(self, x: Tensor) -> Tensor:
        weight, bias = self.gate_up_proj.weight, self.gate_up_proj.bias
        wide = self.down_proj.weight.dtype
        if _has_tiles(x) and wide is x.dtype:
            from encoder_svc.layers.gated_triton import LEAST_ROWS, gated_linear

            if len(x) >= LEAST_ROWS:
                return gated_linear(x, weight, bias)
        if not x.is_cuda:  # there a product adds its bias for nothing
            return silu_and_mul(F.linear(x, weight, bias), dtype=wide)
        return silu_and_mul(F.linear(x, weight), bias=bias, dtype=wide)


def _has_tiles(x: Tensor) -> bool:
    """Whether x is where the kernel runs: a GPU of Hopper's kind or later, in 16 bits, aligned."""
    half = x.dtype in (torch.float16, torch.bfloat16) and x.shape[-1] % 8 == 0
    return half and x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer
