"""Two-dimensional rotary embedding of vision towers: half the angles turn with y, half with x."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Angles(NamedTuple):
    """Cosines and sines of each token's angles, float32 [N, D/2] each."""

    cos: Tensor
    sin: Tensor


def axial_angles(y_N: Tensor, x_N: Tensor, *, head_dim: int, theta: float) -> Angles:
    """Su et al. 2021, on each axis, with a quarter of the head's dimensions as frequencies."""
    per_axis = head_dim // 2
    steps = torch.arange(0, per_axis, 2, dtype=torch.float32, device=y_N.device)
    frequencies = 1.0 / theta ** (steps / per_axis)
    angles = torch.cat(
        (y_N[:, None].float() * frequencies, x_N[:, None].float() * frequencies), dim=-1
    )
    return Angles(angles.cos(), angles.sin())


def rotate(x_NHD: Tensor, angles: Angles) -> Tensor:
    """Turns pairs (i, i + D/2) of each head, in float32, and returns x's dtype."""
    first, second = x_NHD.float().chunk(2, dim=-1)
    cos, sin = angles.cos.unsqueeze(1), angles.sin.unsqueeze(1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x_NHD.dtype)
