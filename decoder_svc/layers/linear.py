"""Linear layers split over tensor-parallel ranks by output (column) or input (row) features."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from chiasm.kernels.gemv import linear
from decoder_svc.models.weights import CheckpointReader
from decoder_svc.parallel.mesh import ParallelMesh, Shard
from decoder_svc.parallel.tp import all_reduce


class ColumnLinear(nn.Module):
    """Output features split; several checkpoint tensors (q, k, v; gate, up) run as one product."""

    def __init__(self, in_features: int, shards: Sequence[Shard], *, bias: bool) -> None:
        super().__init__()
        self._shards = tuple(shards)
        width = sum(len(shard) for shard in shards)
        self.weight = nn.Parameter(torch.empty(width, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(width), requires_grad=False) if bias else None

    def load(self, reader: CheckpointReader, names: Sequence[str]) -> None:
        """Reads this rank's rows of each named module, stacked in order."""
        at = 0
        for name, shard in zip(names, self._shards, strict=True):
            reader.rows(f"{name}.weight", shard, self.weight[at : at + len(shard)])
            if self.bias is not None:
                reader.rows(f"{name}.bias", shard, self.bias[at : at + len(shard)])
            at += len(shard)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, in] to [T, sum of the shards]."""
        return linear(hidden, self.weight, self.bias)


class RowLinear(nn.Module):
    """Input features split; the partial products are summed over ranks."""

    def __init__(self, shard: Shard, out_features: int, mesh: ParallelMesh) -> None:
        super().__init__()
        self._shard = shard
        self._mesh = mesh
        self.weight = nn.Parameter(torch.empty(out_features, len(shard)), requires_grad=False)

    def load(self, reader: CheckpointReader, name: str) -> None:
        """Reads this rank's columns."""
        reader.columns(f"{name}.weight", self._shard, self.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, the shard's width] to [T, out], complete on every rank."""
        return all_reduce(linear(hidden, self.weight), self._mesh)
