"""The likeliest token of each row, when every rank has the logits of a part of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from chiasm.kernels.argmax import greedy
from decoder_svc.parallel.mesh import ParallelMesh, Shard
from decoder_svc.sampling.drawn import Drawn


class Greedy:
    """Each rank finds the best of its part; three numbers a row are exchanged, not the logits.

    Args:
        own: The part of the vocabulary that this rank has logits of.
        masked_token_ids: Ids that are never drawn.
        mesh: Where the rank is.
        device: Where the logits are.
    """

    def __init__(
        self,
        own: Shard,
        masked_token_ids: Sequence[int],
        *,
        mesh: ParallelMesh,
        device: torch.device,
    ) -> None:
        self._own = own
        self._mesh = mesh
        local = [token - own.begin for token in masked_token_ids if own.begin <= token < own.end]
        self._masked = torch.tensor(local, dtype=torch.int64, device=device)

    def draw(self, local: torch.Tensor) -> Drawn:
        """Logits [S, rows], padding last, to the same draws on every rank. Can be captured."""
        ids, best, finite = greedy(local[:, : len(self._own)], self._masked)
        if self._mesh.tp_size == 1:
            return Drawn(ids, finite)
        # Ids are exact in float32: no vocabulary has 2^24 of them.
        mine = torch.stack((best, (ids + self._own.begin).float(), finite.float()))
        everyone = mine.new_empty(self._mesh.tp_size * len(mine), len(best))
        dist.all_gather_into_tensor(everyone, mine, group=self._mesh.tp_group)
        first, *others = everyone.view(self._mesh.tp_size, *mine.shape)
        best, chosen, sound = first
        for other_best, other_chosen, other_sound in others:
            better = other_best > best  # on a tie the smaller id stays
            best = torch.where(better, other_best, best)
            chosen = torch.where(better, other_chosen, chosen)
            sound = torch.minimum(sound, other_sound)
        return Drawn(chosen.long(), sound > 0)
