"""Attention within segments of a packed sequence: what a backend must do.

Shape suffixes: N packed tokens, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Group:
    """`count` segments of equal `length`.

    `where` picks their tokens, segment after segment: a slice where they lie side by side.
    """

    where: slice | Tensor
    count: int
    length: int


@dataclass(frozen=True, slots=True)
class Segments:
    """A partition of a packed sequence: every token lies in one segment and attends within it."""

    groups: tuple[Group, ...]
    num_tokens: int

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device) -> Segments:
        """Segments that follow each other; equal lengths become one group."""
        starts: dict[int, list[int]] = {}
        total = 0
        for length in lengths:
            assert length > 0
            starts.setdefault(length, []).append(total)
            total += length
        groups = tuple(_group(begins, length, device) for length, begins in starts.items())
        return cls(groups, total)


class SegmentAttention(Protocol):
    """A backend. Scale is 1/sqrt(D); no mask, no dropout."""

    def __call__(self, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, segments: Segments) -> Tensor:
        """Returns [N, H * D]."""
        ...


def _group(begins: list[int], length: int, device: torch.device) -> Group:
    count = len(begins)
    if begins[-1] - begins[0] == (count - 1) * length:
        return Group(slice(begins[0], begins[-1] + length), count, length)
    first = torch.tensor(begins).unsqueeze(1)
    where = (first + torch.arange(length)).flatten().to(device)
    return Group(where, count, length)
