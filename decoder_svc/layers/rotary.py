"""Multimodal rotary embedding (M-RoPE, Qwen2-VL report, section 2.1).

Each frequency turns by one of three positions (time, height, width); which one is fixed by
`mrope_section`. For text the three are equal and this is ordinary rotary embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from decoder_svc.config.from_hf import TextConfig


@dataclass(frozen=True)
class Angles:
    """By how much the heads of a step's tokens are turned; the same for all layers.

    The first 2 x F features of a head are turned, the others are left as they are.
    """

    cos: torch.Tensor
    """[T, F] float32"""
    sin: torch.Tensor
    """[T, F] float32"""
    interleaved: bool = False
    """Whether features (2i, 2i + 1) are a pair; otherwise (i, i + F) are."""

    @cached_property
    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors of a head's turned features, and of their partners: [T, 1, 2F] each."""
        join = torch.stack if self.interleaved else torch.cat
        cos, sin = join((self.cos, self.cos), dim=-1), join((-self.sin, self.sin), dim=-1)
        return cos.flatten(1).unsqueeze(1), sin.flatten(1).unsqueeze(1)


class MRotary:
    """Angles for a step, shared by all its layers."""

    def __init__(self, config: TextConfig) -> None:
        half = config.rotary_dim // 2
        self._exponents = tuple(2 * i / config.rotary_dim for i in range(half))
        self._theta = config.rope_theta
        self._axes = _axes(half, config.mrope_section, interleaved=config.mrope_interleaved)
        self._pairs = config.rotary_pairs
        self._inverse: torch.Tensor | None = None
        self._axis: torch.Tensor | None = None

    def place(self, device: torch.device) -> None:
        """Puts the frequencies on the device the model runs on."""
        exponents = torch.tensor(self._exponents, dtype=torch.float32)
        self._inverse = (1.0 / (self._theta**exponents)).to(device)
        self._axis = torch.tensor(self._axes, device=device)

    def angles(self, positions: torch.Tensor) -> Angles:
        """The angles of tokens at positions [3, T]."""
        assert self._inverse is not None and self._axis is not None, "place() comes first"
        angle = positions.float().t().index_select(1, self._axis) * self._inverse
        return Angles(angle.cos(), angle.sin(), interleaved=self._pairs)


def rotate_(heads: torch.Tensor, angles: Angles) -> None:
    """Turns [T, heads, head_dim] in place; arithmetic in the heads' own dtype."""
    cos, sin = (part.to(heads.dtype) for part in angles.whole)
    turned = heads[..., : cos.shape[-1]]
    if angles.interleaved:
        partners = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partners = turned.roll(cos.shape[-1] // 2, dims=-1)
    torch.addcmul(turned * cos, partners, sin, out=turned)


def _axes(half: int, section: Sequence[int], *, interleaved: bool) -> tuple[int, ...]:
    """Which of time, height and width each frequency follows."""
    if not section:
        return (0,) * half
    if not interleaved:
        return tuple(axis for axis, width in enumerate(section) for _ in range(width))
    return tuple(i % 3 if i < 3 * section[i % 3] else 0 for i in range(half))
