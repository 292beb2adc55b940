"""Draws a token of each row at random, from the ids that top-k, top-p and min-p leave.

No sort: the least likely id that stays is found by bisection, over the numbers a logit can be. The
distribution is then inverted in the order of ids, so a row's token follows from its logits, its
settings and its random number alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chiasm.kernels.launch import compiled


@dataclass(frozen=True, slots=True)
class Filters:
    """What each of S rows wants, all [S] float64 on the logits' device."""

    temperature: torch.Tensor
    """Above 0."""
    top_k: torch.Tensor
    """Whole numbers; 0 = all."""
    top_p: torch.Tensor
    """In (0, 1], measured against what top-k left; the id that crosses it stays."""
    min_p: torch.Tensor
    """In [0, 1], against the likeliest."""

    def __len__(self) -> int:
        """S."""
        return len(self.top_k)


def draw_tokens(logits: torch.Tensor, filters: Filters, uniforms: torch.Tensor) -> torch.Tensor:
    """Logits [S, V] float32 and random numbers [S] float64 in [0, 1) to ids [S] int64.

    Among ids that are as likely as the last one that stays, the smaller go first. A row with a NaN
    or positive infinity gets some id in range.
    """
    if not compiled(logits):
        return draw_reference(logits, filters, uniforms)
    from chiasm.kernels.draw_triton import launch_draw

    return launch_draw(logits, filters, uniforms)


def draw_reference(logits: torch.Tensor, filters: Filters, uniforms: torch.Tensor) -> torch.Tensor:
    """`draw_tokens` in plain torch, in float64."""
    scaled = logits / filters.temperature.float().unsqueeze(1)
    scaled = scaled.nan_to_num(nan=0.0, posinf=0.0, neginf=float("-inf"))
    probabilities = scaled.softmax(dim=-1, dtype=torch.float64)
    top_k, top_p, min_p = (
        part.unsqueeze(1) for part in (filters.top_k, filters.top_p, filters.min_p)
    )
    if bool(((top_k > 0) | (top_p < 1) | (min_p > 0)).any()):
        ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
        place = torch.arange(ranked.shape[1], device=logits.device)
        kept = ranked.masked_fill((place >= top_k) & (top_k > 0), 0.0)
        # An id stays while the mass before it is below top_p: the one that crosses is in.
        before = kept.cumsum(dim=-1) - kept
        total = kept.sum(dim=-1, keepdim=True)
        kept = kept.masked_fill((before >= top_p * total) & (top_p < 1), 0.0)
        kept = kept.masked_fill(kept < min_p * ranked[:, :1], 0.0)
        probabilities = torch.zeros_like(kept).scatter_(1, order, kept)
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Strictly below the total, so that some id's cumulative mass exceeds it: one that has mass.
    level = torch.minimum(uniforms.unsqueeze(1) * total, torch.nextafter(total, total * 0))
    picked = torch.searchsorted(cumulative, level, right=True).squeeze(1)
    return picked.clamp_(max=logits.shape[1] - 1)  # only a row that was all NaN gets here
