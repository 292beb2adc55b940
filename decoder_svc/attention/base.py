"""What a backend of paged attention promises. Each step is planned once and used by every layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from chiasm.kernels.paged_decode import Lookup
from decoder_svc.layers.rotary import Angles


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The sequences of a step laid end to end, those of a single token first.

    Legend: S sequences, T tokens of all of them, P pages of the longest.
    """

    starts: np.ndarray
    """[S] int64: tokens of the sequence that are in pages already."""
    lengths: np.ndarray
    """[S] int64: tokens of the sequence in this step."""
    block_tables: np.ndarray
    """[S, P] int64: page ids in order, padded with 0."""
    num_single: int
    """The first so many sequences have exactly one token."""
    seats: np.ndarray
    """[S] int64: rows of the block tables on the device."""


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """S sequences of one token each, on the device. Rows that are not used have length 0."""

    lookup: Lookup
    slots: torch.Tensor
    """[S] int64: where K and V of the token go; negative = nowhere."""


class AttentionBackend(ABC):
    """Writes K and V of a step's tokens into pages; lets queries look at what they may see."""

    can_be_captured: bool = False
    """Whether steps of one token a sequence can be recorded as CUDA graphs: `plan_decode`."""

    @abstractmethod
    def plan(self, batch: AttentionBatch, slots: torch.Tensor) -> None:
        """Prepares a step. `slots` [T]: page id x page size + place in the page, per token."""

    @abstractmethod
    def attend(self, layer: int, qkv: torch.Tensor, angles: Angles) -> torch.Tensor:
        """[T, heads + 2 x kv_heads, dim], queries then keys then values, to [T, heads, dim].

        Turns queries and keys, and puts keys and values into their pages. Query i of a sequence
        sees that sequence's tokens up to and including itself. `layer` counts from the stage's
        first. `qkv` may be overwritten.
        """

    def plan_decode(self, step: DecodeStep) -> None:
        """Prepares steps of one token a sequence whose numbers change in place, for a CUDA graph.

        Only where the backend can be captured.
        """
        assert not self.can_be_captured, "a backend that can be captured plans its own"
