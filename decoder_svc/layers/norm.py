"""Root mean square normalisation; replicated on every rank."""

from __future__ import annotations

import torch
from torch import nn

from chiasm.kernels.norm import add_rms_norm, rms_norm
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
        return rms_norm(hidden, self.weight, eps=self._eps)

    def add(
        self, residual: torch.Tensor, update: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds an update to the residual stream; both [T, size]. Returns the sum, and it normed."""
        return add_rms_norm(residual, update, self.weight, eps=self._eps)
