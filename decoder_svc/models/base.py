"""What the runner asks of a language model: one pipeline stage of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Set

import torch
from torch import nn

from decoder_svc.attention.base import AttentionBackend
from decoder_svc.config.from_hf import TextConfig
from decoder_svc.models.weights import CheckpointReader
from decoder_svc.parallel.mesh import ParallelMesh


class StageModel(nn.Module, ABC):
    """The layers of one stage; the first also embeds, the last also has norm and lm_head."""

    def __init__(self, config: TextConfig, mesh: ParallelMesh) -> None:
        super().__init__()
        self.config = config
        self.mesh = mesh

    @staticmethod
    @abstractmethod
    def tensor_names(config: TextConfig) -> Set[str]:
        """Every tensor a checkpoint of this family must hold for the language model."""

    @abstractmethod
    def load(self, reader: CheckpointReader) -> None:
        """Reads this rank's part of the stage."""

    @abstractmethod
    def place_constants(self) -> None:
        """Computes what follows from the config alone, on the model's device."""

    @abstractmethod
    def embed(self, token_ids: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """First stage: ids [T] to [T, hidden], `rows` [R, hidden] in place of tokens `at` [R]."""

    @abstractmethod
    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """[T, hidden] through the stage's layers; `positions` is [3, T]: time, height, width.

        Must be capturable as a CUDA graph: nothing of it may depend on what tensors hold, or wait
        for the device.
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Last stage: [S, hidden] of the tokens that are sampled from to [S, vocab]."""
