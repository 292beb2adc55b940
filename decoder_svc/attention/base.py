"""What a backend of paged attention promises. Each step is planned once and used by every layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch


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


class AttentionBackend(ABC):
    """Writes K and V of a step's tokens into pages; lets queries look at what they may see."""

    @abstractmethod
    def plan(self, batch: AttentionBatch, slots: torch.Tensor) -> None:
        """Prepares a step. `slots` [T]: page id x page size + place in the page, per token."""

    @abstractmethod
    def attend(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Queries [T, heads, dim], keys and values [T, kv_heads, dim] to [T, heads, dim].

        Query i of a sequence sees that sequence's tokens up to and including itself. `layer` counts
        from the stage's first.
        """
