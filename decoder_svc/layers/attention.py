"""Self-attention with grouped KV heads. Where K and V live, and reading them, is the backend's."""

from __future__ import annotations

import torch
from torch import nn

from decoder_svc.attention.base import AttentionBackend
from decoder_svc.config.from_hf import TextConfig
from decoder_svc.layers.linear import ColumnLinear, RowLinear
from decoder_svc.layers.norm import RMSNorm
from decoder_svc.layers.rotary import Angles
from decoder_svc.models.weights import CheckpointReader
from decoder_svc.parallel.mesh import ParallelMesh


class Attention(nn.Module):
    """Projections, rotation and the call to the backend, for this rank's heads.

    Args:
        config: Heads, biases and norms of the model.
        mesh: Which heads are this rank's.
        layer: Its index among the layers of this stage.

    Raises:
        ValueError: Heads do not divide evenly over the ranks.
    """

    def __init__(self, config: TextConfig, mesh: ParallelMesh, layer: int) -> None:
        super().__init__()
        self._layer = layer
        self._head_dim = config.head_dim
        queries = mesh.split(
            config.num_heads * config.head_dim, unit=config.head_dim, what="attention heads"
        )
        keys = mesh.split_kv(config.num_kv_heads, config.head_dim)
        self._heads = len(queries) // config.head_dim
        self._kv_heads = len(keys) // config.head_dim
        self.qkv = ColumnLinear(
            config.hidden_size,
            (queries, keys, keys),
            bias=config.qkv_bias,
            eight_bits=config.eight_bits,
        )
        self.out = RowLinear(queries, config.hidden_size, mesh, eight_bits=config.eight_bits)
        self.query_norm = RMSNorm(config.head_dim, config.rms_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(config.head_dim, config.rms_eps) if config.qk_norm else None

    def load(self, reader: CheckpointReader, name: str) -> None:
        """Reads the four projections, and the norms."""
        self.qkv.load(reader, tuple(f"{name}.{part}_proj" for part in "qkv"))
        self.out.load(reader, f"{name}.o_proj")
        if self.query_norm is not None and self.key_norm is not None:
            self.query_norm.load(reader, f"{name}.q_norm")
            self.key_norm.load(reader, f"{name}.k_norm")

    def forward(
        self,
        hidden: torch.Tensor,
        angles: Angles,
        backend: AttentionBackend,
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, hidden] to [T, hidden], or to [S, hidden] of the tokens `keep` [S].

        K and V of all T tokens are in the pages afterwards.
        """
        qkv = self.qkv(hidden).view(len(hidden), self._heads + 2 * self._kv_heads, self._head_dim)
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys, values = qkv.split((self._heads, self._kv_heads, self._kv_heads), dim=1)
            qkv = torch.cat((self.query_norm(queries), self.key_norm(keys), values), dim=1)
        mixed = backend.attend(self._layer, qkv, angles)
        mixed = mixed.reshape(len(hidden), self._heads * self._head_dim)
        out: torch.Tensor = self.out(mixed if keep is None else mixed.index_select(0, keep))
        return out
