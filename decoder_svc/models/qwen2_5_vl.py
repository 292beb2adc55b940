"""The text model of Qwen2.5-VL, one pipeline stage of it. Rows of media replace tokens."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import nn

from decoder_svc.attention.base import AttentionBackend
from decoder_svc.config.from_hf import TextConfig
from decoder_svc.layers.attention import Attention
from decoder_svc.layers.embedding import VocabParallelEmbedding
from decoder_svc.layers.mlp import GatedMLP
from decoder_svc.layers.norm import RMSNorm
from decoder_svc.layers.rotary import Angles, MRotary
from decoder_svc.models.base import StageModel
from decoder_svc.models.weights import CheckpointReader
from decoder_svc.parallel.mesh import ParallelMesh
from decoder_svc.parallel.stages import stage_layers

_EMBEDDING = "model.embed_tokens"
_NORM = "model.norm"
_LM_HEAD = "lm_head"
_LAYER_TENSORS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    *(f"self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")),
    "self_attn.o_proj.weight",
    *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each normalised before and added after."""

    def __init__(self, config: TextConfig, mesh: ParallelMesh, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_eps)
        self.attention = Attention(config, mesh, layer)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, mesh)

    def load(self, reader: CheckpointReader, name: str) -> None:
        """Reads this rank's part of the layer."""
        self.attention_norm.load(reader, f"{name}.input_layernorm")
        self.attention.load(reader, f"{name}.self_attn")
        self.mlp_norm.load(reader, f"{name}.post_attention_layernorm")
        self.mlp.load(reader, f"{name}.mlp")

    def forward(
        self,
        residual: torch.Tensor,
        update: torch.Tensor | None,
        angles: Angles,
        backend: AttentionBackend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds to the residual stream [T, hidden] what the layer before has left to add.

        Returns:
            The residual stream, and what this layer leaves to add to it.
        """
        if update is None:
            normed = self.attention_norm(residual)
        else:
            residual, normed = self.attention_norm.add(residual, update)
        mixed = self.attention(normed, angles, backend)
        residual, normed = self.mlp_norm.add(residual, mixed)
        return residual, self.mlp(normed)


class Qwen25VLStage(StageModel):
    """See the base class. A tied lm_head is the embedding: held by the first and the last stage."""

    def __init__(self, config: TextConfig, mesh: ParallelMesh) -> None:
        super().__init__(config, mesh)
        own = stage_layers(config, mesh)
        self._first_layer = own.start
        self.layers = nn.ModuleList(DecoderLayer(config, mesh, index) for index in range(len(own)))
        self.rotary = MRotary(config.head_dim, config.rope_theta, config.mrope_section)
        vocabulary = (config.vocab_size, config.hidden_size, mesh)
        self.embedding = VocabParallelEmbedding(*vocabulary) if mesh.is_first_stage else None
        self.norm: RMSNorm | None = None
        self.lm_head: VocabParallelEmbedding | None = None
        if mesh.is_last_stage:
            self.norm = RMSNorm(config.hidden_size, config.rms_eps)
            shared = self.embedding if config.tied else None
            self.lm_head = shared or VocabParallelEmbedding(*vocabulary)

    @staticmethod
    def tensor_names(config: TextConfig) -> Set[str]:
        """See the base class."""
        names = {f"{_EMBEDDING}.weight", f"{_NORM}.weight"}
        if not config.tied:
            names.add(f"{_LM_HEAD}.weight")
        for layer in range(config.num_layers):
            names.update(f"model.layers.{layer}.{tensor}" for tensor in _LAYER_TENSORS)
        return names

    def load(self, reader: CheckpointReader) -> None:
        """See the base class."""
        if self.embedding is not None:
            self.embedding.load(reader, _EMBEDDING)
        for index, layer in enumerate(self.layers, self._first_layer):
            assert isinstance(layer, DecoderLayer)
            layer.load(reader, f"model.layers.{index}")
        if self.norm is not None and self.lm_head is not None:
            self.norm.load(reader, _NORM)
            if self.lm_head is not self.embedding:
                self.lm_head.load(reader, _EMBEDDING if self.config.tied else _LM_HEAD)
        self.place_constants()

    def place_constants(self) -> None:
        """See the base class."""
        self.rotary.place(next(self.parameters()).device)

    def embed(self, token_ids: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        assert self.embedding is not None, "only the first stage embeds"
        hidden: torch.Tensor = self.embedding(token_ids)
        return hidden.index_copy(0, at, rows) if len(at) else hidden

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """See the base class."""
        angles = self.rotary.angles(positions)
        update = None
        for layer in self.layers:
            hidden, update = layer(hidden, update, angles, attention)
        assert update is not None, "a stage has at least one layer"
        total: torch.Tensor = hidden + update
        return total

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        assert self.norm is not None and self.lm_head is not None, "only the last stage has logits"
        return self.lm_head.logits(self.norm(hidden))
