"""Normalisation: root mean square, and with mean and bias."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chiasm.kernels.norm import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """Zhang and Sennrich 2019. Computed in float32, returned in the weight's dtype."""

    def __init__(self, size: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        return rms_norm(x, self.weight, eps=self._eps)

    def after(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream with a block's output added, in x's dtype, and its normalisation."""
        return add_rms_norm(x, delta, self.weight, eps=self._eps)


class LayerNorm(nn.Module):
    """Ba et al. 2016. Takes a wider residual stream too; returned in the weight's dtype."""

    def __init__(self, size: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension."""
        weight, bias = self.weight, self.bias
        if x.dtype is weight.dtype:
            return F.layer_norm(x, weight.shape, weight, bias, self._eps)
        wide = F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), self._eps)
        return wide.to(weight.dtype)
