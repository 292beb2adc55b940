"""The language model of every family, one pipeline stage of it, built as its TextConfig says.

Rows of media replace tokens; their further levels are added behind the first layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from decoder_svc.attention.base import AttentionBackend
from decoder_svc.config.from_hf import TextConfig
from decoder_svc.layers.attention import Attention
from decoder_svc.layers.embedding import VocabParallelEmbedding
from decoder_svc.layers.mlp import GatedMLP
from decoder_svc.layers.moe import MoE
from decoder_svc.layers.norm import RMSNorm
from decoder_svc.layers.rotary import Angles, MRotary
from decoder_svc.models.weights import CheckpointReader
from decoder_svc.parallel.mesh import ParallelMesh
from decoder_svc.parallel.stages import stage_layers

_EMBEDDING = "model.embed_tokens"
_NORM = "model.norm"
_LM_HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class MediaRows:
    """Rows of media in a step's tokens: R rows of several levels."""

    at: torch.Tensor
    """[R]: the tokens they replace."""
    rows: torch.Tensor
    """[R, levels x hidden]"""
    hidden_size: int

    def level(self, index: int) -> torch.Tensor:
        """[R, hidden]; level 0 is the embedding."""
        return self.rows.narrow(1, index * self.hidden_size, self.hidden_size)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each normalised before, and in some families after, it is added.

    Args:
        config: The model.
        mesh: The rank's place.
        index: Among the layers of the stage.
        layer: Among those of the model.
    """

    def __init__(self, config: TextConfig, mesh: ParallelMesh, *, index: int, layer: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_eps
        experts = config.expert_layer(layer)
        self.attention_norm = RMSNorm(size, eps)
        self.attention = Attention(config, mesh, index)
        self.mlp_norm = RMSNorm(size, eps)
        self.mlp = (
            GatedMLP(size, config.intermediate_size, mesh, eight_bits=config.eight_bits)
            if experts is None
            else MoE(experts, size, mesh, eight_bits=config.eight_bits)
        )
        self.attention_out_norm = RMSNorm(size, eps) if config.sandwich_norms else None
        self.mlp_out_norm = RMSNorm(size, eps) if config.sandwich_norms else None

    def load(self, reader: CheckpointReader, name: str) -> None:
        """Reads this rank's part of the layer."""
        self.attention_norm.load(reader, f"{name}.input_layernorm")
        self.attention.load(reader, f"{name}.self_attn")
        self.mlp_norm.load(reader, f"{name}.post_attention_layernorm")
        self.mlp.load(reader, f"{name}.mlp")
        if self.attention_out_norm is not None and self.mlp_out_norm is not None:
            self.attention_out_norm.load(reader, f"{name}.post_self_attn_layernorm")
            self.mlp_out_norm.load(reader, f"{name}.post_mlp_layernorm")

    def forward(
        self,
        residual: torch.Tensor,
        update: torch.Tensor | None,
        angles: Angles,
        backend: AttentionBackend,
        keep: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds to the residual stream [T, hidden] what the layer before has left to add.

        With `keep` [S] only these tokens go on behind the attention.

        Returns:
            The residual stream, and what this layer leaves to add to it.
        """
        if update is None:
            normed = self.attention_norm(residual)
        else:
            residual, normed = self.attention_norm.add(residual, update)
        mixed = self.attention(normed, angles, backend, keep)
        if keep is not None:
            residual = residual.index_select(0, keep)
        if self.attention_out_norm is not None:
            mixed = self.attention_out_norm(mixed)
        residual, normed = self.mlp_norm.add(residual, mixed)
        mixed = self.mlp(normed)
        if self.mlp_out_norm is not None:
            mixed = self.mlp_out_norm(mixed)
        return residual, mixed


class DecoderStage(nn.Module):
    """The layers of one stage; the first also embeds, the last also has norm and lm_head.

    A tied lm_head is the embedding: held by the first and the last stage.
    """

    def __init__(self, config: TextConfig, mesh: ParallelMesh) -> None:
        super().__init__()
        self.config = config
        self.mesh = mesh
        own = stage_layers(config, mesh)
        self._first_layer = own.start
        self.layers = nn.ModuleList(
            DecoderLayer(config, mesh, index=index, layer=layer) for index, layer in enumerate(own)
        )
        self.rotary = MRotary(config)
        vocabulary = (config.vocab_size, config.hidden_size, mesh)
        self.embedding = VocabParallelEmbedding(*vocabulary) if mesh.is_first_stage else None
        self.norm: RMSNorm | None = None
        self.lm_head: VocabParallelEmbedding | None = None
        if mesh.is_last_stage:
            self.norm = RMSNorm(config.hidden_size, config.rms_eps)
            shared = self.embedding if config.tied else None
            self.lm_head = shared or VocabParallelEmbedding(*vocabulary)

    def load(self, reader: CheckpointReader) -> None:
        """Reads this rank's part of the stage."""
        if self.embedding is not None:
            reader.place(self.embedding)
            self.embedding.load(reader, _EMBEDDING)
        for index, layer in enumerate(self.layers, self._first_layer):
            assert isinstance(layer, DecoderLayer)
            reader.place(layer)
            layer.load(reader, f"model.layers.{index}")
        if self.norm is not None and self.lm_head is not None:
            reader.place(self.norm)
            self.norm.load(reader, _NORM)
            if self.lm_head is not self.embedding:
                reader.place(self.lm_head)
                self.lm_head.load(reader, _EMBEDDING if self.config.tied else _LM_HEAD)
        self.place_constants()

    def place_constants(self) -> None:
        """Computes what follows from the config alone, on the model's device."""
        self.rotary.place(next(self.parameters()).device)

    def embed(self, token_ids: torch.Tensor, media: MediaRows | None) -> torch.Tensor:
        """First stage: ids [T] to [T, hidden], rows of media in place of their tokens."""
        assert self.embedding is not None, "only the first stage embeds"
        hidden: torch.Tensor = self.embedding(token_ids)
        return hidden if media is None else hidden.index_copy(0, media.at, media.level(0))

    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        media: MediaRows | None = None,
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, hidden] through the stage's layers.

        Without media it can be captured as a CUDA graph: nothing of it depends on what tensors
        hold, or waits for the device.

        Args:
            hidden: As the stage begins.
            positions: [3, T]: time, height, width.
            attention: Where K and V live.
            media: First stage: rows of media, whose further levels are added layer by layer.
            keep: [S]: tokens that matter behind the stage; None = all.

        Returns:
            [T, hidden], or [S, hidden] with `keep`.
        """
        last = len(self.layers) - 1
        deeper = self.config.deepstack_levels if media is not None else 0
        assert keep is None or last >= deeper, "media meet a shortened layer"
        angles = self.rotary.angles(positions)
        update = None
        for index, layer in enumerate(self.layers):
            kept = keep if index == last else None
            hidden, update = layer(hidden, update, angles, attention, kept)
            if media is not None and index < deeper:
                update = update.index_add(0, media.at, media.level(index + 1))
        assert update is not None, "a stage has at least one layer"
        total: torch.Tensor = hidden + update
        return total

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Last stage: [S, hidden] of the tokens that are sampled from to [S, vocab]."""
        return self.head.gather(self.local_logits(hidden))

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Last stage: the same of this rank's part of the vocabulary, [S, its rows]."""
        assert self.norm is not None, "only the last stage has logits"
        return self.head.local_logits(self.norm(hidden))

    @property
    def head(self) -> VocabParallelEmbedding:
        """Last stage: the lm_head."""
        assert self.lm_head is not None, "only the last stage has an lm_head"
        return self.lm_head
