"""Root mean square normalisation; replicated on every rank."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from decoder_svc.models.weights import CheckpointReader


class RMSNorm(nn.Module):
    """x / rms(x) x weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self._eps = eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def load(self, reader: CheckpointReader, name: str) -> None:
        """Reads the weight whole."""
        reader.full(f"{name}.weight", self.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, size] to the same shape and dtype."""
        return F.rms_norm(hidden, self.weight.shape, self.weight, self._eps)
