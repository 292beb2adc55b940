"""Two-dimensional rotary embedding of vision towers: half the angles turn with y, half with x.

Checkpoints pair dimension i of a head with i + D/2. Here a pair lies side by side, 2i and 2i + 1,
where a kernel finds it in one thread; queries and keys are put in that order with their weights,
which leaves their products as they are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Angles(NamedTuple):
    """Cosines and sines of each token's pairs, float32 [N, D/2] each."""

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
    """Turns pairs (2i, 2i + 1) of each head, in float32, and returns x's dtype.

    A pair is a complex number, and turning it a product: one pass over memory.
    """
    pairs = torch.view_as_complex(x_NHD.float().unflatten(-1, (-1, 2)))
    turned = pairs * torch.complex(angles.cos, angles.sin).unsqueeze(1)
    return torch.view_as_real(turned).flatten(-2).to(x_NHD.dtype)


def pair_up(rows: Tensor, *, head_dim: int) -> Tensor:
    """Rows of a projection's weight or bias, [heads * D, ...], from halves to pairs."""
    halves = rows.unflatten(0, (-1, 2, head_dim // 2))
    pairs: Tensor = halves.transpose(1, 2).flatten(0, 2)
    return pairs.contiguous()
