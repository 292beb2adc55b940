"""Token embedding and lm_head, split over tensor-parallel ranks by vocabulary rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from chiasm.kernels.gemv import linear
from decoder_svc.models.weights import CheckpointReader
from decoder_svc.parallel.mesh import ParallelMesh, Shard
from decoder_svc.parallel.tp import all_gather_features, all_reduce


class VocabParallelEmbedding(nn.Module):
    """Rows of the vocabulary; used as embedding, as lm_head, or (tied) as both.

    Every rank holds equally many rows; those past the vocabulary's end are zero, never looked up.
    """

    def __init__(self, vocab_size: int, hidden_size: int, mesh: ParallelMesh) -> None:
        super().__init__()
        self._vocab_size = vocab_size
        self._mesh = mesh
        self._shard = mesh.split_padded(vocab_size)
        self.weight = nn.Parameter(torch.empty(len(self._shard), hidden_size), requires_grad=False)

    def load(self, reader: CheckpointReader, name: str) -> None:
        """Reads this rank's rows."""
        reader.rows(f"{name}.weight", self._shard, self.weight)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] to [T, hidden]: each rank looks up the ids it holds, the sum is complete."""
        if self._mesh.tp_size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self._shard.begin
        foreign = (local < 0) | (local >= len(self._shard))
        found = F.embedding(local.masked_fill(foreign, 0), self.weight)
        return all_reduce(found.masked_fill(foreign.unsqueeze(-1), 0), self._mesh)

    @property
    def own(self) -> Shard:
        """The vocabulary rows of this rank that exist."""
        end = min(self._shard.end, self._vocab_size)
        return Shard(min(self._shard.begin, end), end, self._vocab_size)

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden] to [S, rows]: logits of this rank's rows, padding included."""
        return linear(hidden, self.weight)

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """Every rank's logits [S, rows] to [S, vocab], complete on every rank."""
        return all_gather_features(local, self._mesh)[:, : self._vocab_size]
