"""Multimodal rotary embedding (M-RoPE, Qwen2-VL report, section 2.1).

Each frequency turns by one of three positions (time, height, width); which one is fixed by
`mrope_section`. For text the three are equal and this is ordinary rotary embedding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class MRotary:
    """Angles for a step, shared by all its layers."""

    def __init__(self, head_dim: int, theta: float, section: Sequence[int]) -> None:
        self._exponents = tuple(2 * i / head_dim for i in range(head_dim // 2))
        self._theta = theta
        self._axes = tuple(axis for axis, width in enumerate(section) for _ in range(width))
        self._inverse: torch.Tensor | None = None
        self._axis: torch.Tensor | None = None

    def place(self, device: torch.device) -> None:
        """Puts the frequencies on the device the model runs on."""
        exponents = torch.tensor(self._exponents, dtype=torch.float32)
        self._inverse = (1.0 / (self._theta**exponents)).to(device)
        self._axis = torch.tensor(self._axes, device=device)

    def angles(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Positions [3, T] to cosines and sines [2, T, 1, head_dim]."""
        assert self._inverse is not None and self._axis is not None, "place() comes first"
        angle = positions.float().t().index_select(1, self._axis) * self._inverse
        whole = torch.cat((angle, angle), dim=-1).unsqueeze(1)
        return torch.stack((whole.cos(), whole.sin())).to(dtype)


def rotate(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turns [T, heads, head_dim]: pairs are (i, i + head_dim / 2)."""
    first, second = heads.chunk(2, dim=-1)
    return heads * angles[0] + torch.cat((-second, first), dim=-1) * angles[1]
