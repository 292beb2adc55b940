"""Greedy sampling: the largest logit of each row, and whether the row is sound.

The row is read once, split across programs so that small batches fill the GPU too; a second, small
kernel joins the parts.
"""

from __future__ import annotations

import torch

from chiasm.kernels.launch import compiled


def greedy(
    logits: torch.Tensor, masked_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [B, V] to ids [B] int64, their logits [B] float32, and soundness [B] bool.

    The smallest id wins a tie. `masked_ids` [m] int64, a handful, never win (if all ids are masked,
    the id is 0 and its logit -inf). A row with a NaN or an infinity anywhere is not sound, and its
    id, which is in range, means nothing.
    """
    if not compiled(logits):
        return greedy_reference(logits, masked_ids)
    from chiasm.kernels.argmax_triton import launch_greedy

    return launch_greedy(logits, masked_ids)


def greedy_reference(
    logits: torch.Tensor, masked_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`greedy` in plain torch."""
    wide = logits.float()
    sound = wide.isfinite().all(dim=-1)
    wide = wide.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    wide[:, masked_ids] = -torch.inf
    largest = wide.amax(dim=-1)
    vocabulary = wide.shape[1]
    allowed = torch.ones(vocabulary, dtype=torch.bool, device=wide.device)
    allowed[masked_ids] = False
    index = torch.arange(vocabulary, device=wide.device)
    wins = (wide == largest[:, None]) & allowed
    ids = torch.where(wins, index, vocabulary).amin(dim=-1)
    return torch.where(ids < vocabulary, ids, 0), largest, sound
