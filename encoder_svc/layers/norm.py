"""Root mean square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Zhang and Sennrich 2019. Computed in float32, returned in the weight's dtype."""

    def __init__(self, size: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return self.weight * (wide * scale).to(self.weight.dtype)
