"""The gated feed-forward block."""

from __future__ import annotations

import torch
from torch import nn

from chiasm.kernels.activation import silu_and_mul
from decoder_svc.layers.linear import ColumnLinear, RowLinear
from decoder_svc.models.weights import CheckpointReader
from decoder_svc.parallel.mesh import ParallelMesh


class GatedMLP(nn.Module):
    """down(silu(gate(x)) x up(x)), gate and up as one product."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        mesh: ParallelMesh,
        *,
        eight_bits: bool = False,
    ) -> None:
        super().__init__()
        shard = mesh.split(intermediate_size, what="intermediate_size")
        self.gate_up = ColumnLinear(hidden_size, (shard, shard), bias=False, eight_bits=eight_bits)
        self.down = RowLinear(shard, hidden_size, mesh, eight_bits=eight_bits)

    def load(self, reader: CheckpointReader, name: str) -> None:
        """Reads the three projections."""
        self.gate_up.load(reader, (f"{name}.gate_proj", f"{name}.up_proj"))
        self.down.load(reader, f"{name}.down_proj")

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden] to [T, hidden]."""
        mixed: torch.Tensor = self.down(silu_and_mul(self.gate_up(hidden)))
        return mixed
