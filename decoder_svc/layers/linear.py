"""Linear layers split over tensor-parallel ranks by output (column) or input (row) features."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from chiasm.kernels.block_scaled import BLOCK, FP8, block_scaled_linear
from chiasm.kernels.gemv import linear
from decoder_svc.models.weights import CheckpointReader
from decoder_svc.parallel.mesh import ParallelMesh, Shard
from decoder_svc.parallel.tp import all_reduce


class Matrix(nn.Module):
    """A weight [out, in]: of the model's dtype, or of 8 bits with a scale for each 128 x 128.

    Args:
        out_features: Rows.
        in_features: Columns.
        eight_bits: Whether it is of 8 bits.
    """

    def __init__(self, out_features: int, in_features: int, *, eight_bits: bool) -> None:
        super().__init__()
        size = (out_features, in_features)
        self.scales: nn.Parameter | None = None
        if eight_bits:
            self.weight = nn.Parameter(torch.empty(size, dtype=FP8), requires_grad=False)
            blocks = (-(-out_features // BLOCK), in_features // BLOCK)
            scales = torch.empty(blocks, dtype=torch.float32)
            self.scales = nn.Parameter(scales, requires_grad=False)
        else:
            self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def multiply(self, hidden: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[T, in] to [T, out]."""
        if self.scales is None:
            return linear(hidden, self.weight, bias)
        return block_scaled_linear(hidden, self.weight, self.scales, bias)


class ColumnLinear(Matrix):
    """Output features split; several checkpoint tensors (q, k, v; gate, up) run as one product.

    Args:
        in_features: Columns, whole on every rank.
        shards: This rank's rows of each tensor.
        bias: Whether they have biases.
        eight_bits: Whether they may stay in 8 bits: they do where every shard is of whole blocks.
    """

    def __init__(
        self, in_features: int, shards: Sequence[Shard], *, bias: bool, eight_bits: bool = False
    ) -> None:
        whole = in_features % BLOCK == 0 and all(_is_whole(shard) for shard in shards)
        width = sum(len(shard) for shard in shards)
        super().__init__(width, in_features, eight_bits=eight_bits and whole)
        self._shards = tuple(shards)
        self.bias = nn.Parameter(torch.empty(width), requires_grad=False) if bias else None

    def load(self, reader: CheckpointReader, names: Sequence[str]) -> None:
        """Reads this rank's rows of each named module, stacked in order."""
        at = 0
        for name, shard in zip(names, self._shards, strict=True):
            end = at + len(shard)
            reader.rows(f"{name}.weight", shard, self.weight[at:end])
            if self.scales is not None:
                own = self.scales[at // BLOCK : end // BLOCK]
                reader.scales(f"{name}.weight", own, rows=shard)
            if self.bias is not None:
                reader.rows(f"{name}.bias", shard, self.bias[at:end])
            at = end

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, in] to [T, sum of the shards]."""
        return self.multiply(hidden, self.bias)


class RowLinear(Matrix):
    """Input features split; the partial products are summed over ranks.

    Args:
        shard: This rank's columns.
        out_features: Rows, whole on every rank.
        mesh: Ranks to sum over.
        eight_bits: Whether it may stay in 8 bits: it does where the shard is of whole blocks.
    """

    def __init__(
        self, shard: Shard, out_features: int, mesh: ParallelMesh, *, eight_bits: bool = False
    ) -> None:
        super().__init__(out_features, len(shard), eight_bits=eight_bits and _is_whole(shard))
        self._shard = shard
        self._mesh = mesh

    def load(self, reader: CheckpointReader, name: str) -> None:
        """Reads this rank's columns."""
        reader.columns(f"{name}.weight", self._shard, self.weight)
        if self.scales is not None:
            reader.scales(f"{name}.weight", self.scales, columns=self._shard)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, the shard's width] to [T, out], complete on every rank."""
        return all_reduce(self.multiply(hidden), self._mesh)


def _is_whole(shard: Shard) -> bool:
    """Whether it begins and ends between blocks."""
    return shard.begin % BLOCK == 0 and shard.end % BLOCK == 0
