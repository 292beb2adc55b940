"""Attention within segments of a packed sequence: what a backend must do.

Shape suffixes: N packed tokens, H heads, D head dim; 3 is queries, keys, values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from encoder_svc.layers.rotary import Angles


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
    """A partition of a packed sequence: every token lies in one segment and attends within it.

    The same twice: `groups` of equal lengths, and `edges`, int32 [segments + 1] on the device,
    where each begins and the last ends.
    """

    groups: tuple[Group, ...]
    edges: Tensor
    longest: int
    num_tokens: int

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device) -> Segments:
        """Segments that follow each other; equal lengths become one group."""
        starts: dict[int, list[int]] = {}
        edges = [0, *accumulate(lengths)]
        for begin, length in zip(edges, lengths, strict=False):
            assert length > 0
            starts.setdefault(length, []).append(begin)
        groups = tuple(_group(begins, length, device) for length, begins in starts.items())
        on_device = torch.tensor(edges, dtype=torch.int32).to(device)
        return cls(groups, on_device, max(lengths), edges[-1])

    @classmethod
    def alike(cls, count: int, length: int, device: torch.device) -> Segments:
        """So many segments of one length; nothing of it is read from the host."""
        total = count * length
        edges = torch.arange(0, total + 1, length, dtype=torch.int32, device=device)
        return cls((Group(slice(0, total), count, length),), edges, length, total)


class SegmentAttention(Protocol):
    """A backend. Scale is 1/sqrt(D); no mask, no dropout."""

    def __call__(self, qkv_N3HD: Tensor, angles: Angles | None, segments: Segments) -> Tensor:
        """Turns queries and keys by their angles, if any, and attends. Returns [N, H * D]."""
        ...


def _group(begins: list[int], length: int, device: torch.device) -> Group:
    count = len(begins)
    if begins[-1] - begins[0] == (count - 1) * length:
        return Group(slice(begins[0], begins[-1] + length), count, length)
    first = torch.tensor(begins).unsqueeze(1)
    where = (first + torch.arange(length)).flatten().to(device)
    return Group(where, count, length)
