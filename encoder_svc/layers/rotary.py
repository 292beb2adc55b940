"""Two-dimensional rotary embedding of vision towers: half the angles turn with y, half with x."""

from __future__ import annotations

import torch
from torch import Tensor


def axial_angles(y_N: Tensor, x_N: Tensor, *, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [N, 1, head_dim].

    Su et al. 2021, applied to each axis with a quarter of the head's dimensions as frequencies.
    """
    per_axis = head_dim // 2
    steps = torch.arange(0, per_axis, 2, dtype=torch.float32, device=y_N.device)
    frequencies = 1.0 / theta ** (steps / per_axis)
    angles = torch.cat(
        (y_N[:, None].float() * frequencies, x_N[:, None].float() * frequencies), dim=-1
    )
    both = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    return both.cos(), both.sin()


def rotate(x_NHD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> Tensor:
    """Turns pairs (i, i + D/2) of each head, in float32, and returns x's dtype."""
    wide = x_NHD.float()
    first, second = wide.chunk(2, dim=-1)
    turned = wide * cos_N1D + torch.cat((-second, first), dim=-1) * sin_N1D
    return turned.to(x_NHD.dtype)
