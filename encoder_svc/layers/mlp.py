"""Gated feed-forward block of vision towers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class GatedMLP(nn.Module):
    """SwiGLU with biases (Shazeer 2020).

    The product of gate and up can pass 65504, so a float16 tower keeps `down_proj` in float32 and
    everything from the product on is computed in that dtype.
    """

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size)
        self.up_proj = nn.Linear(hidden_size, intermediate_size)
        self.down_proj = nn.Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Returns `down_proj`'s dtype."""
        dtype = self.down_proj.weight.dtype
        gate, up = self.gate_proj(x).to(dtype), self.up_proj(x).to(dtype)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out
