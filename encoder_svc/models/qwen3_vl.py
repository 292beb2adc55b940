"""The vision tower of Qwen3-VL, dense and MoE alike (Bai et al. 2025), our own modules.

Every block attends within a whole temporal group. Besides the last block's, the features of a few
earlier blocks leave the tower: they are the further levels of a row (DeepStack, Meng et al. 2024).
Shape suffixes: N patches, R rows (merge cells), H heads, D head dim, C hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from chiasm.plan import Grid
from encoder_svc.geometry import Geometry
from encoder_svc.layers.attention.base import SegmentAttention, Segments
from encoder_svc.layers.attention.registry import load_attention
from encoder_svc.layers.frames import FrameShape, TableReads, frame_layouts
from encoder_svc.layers.joined_attention import JoinedAttention
from encoder_svc.layers.norm import LayerNorm
from encoder_svc.layers.patch_embed import PatchEmbed
from encoder_svc.layers.rotary import Angles
from encoder_svc.models.base import VisionTower
from encoder_svc.models.vision_config import check_activation, read_rope_theta, read_sizes

_SIZES = (
    "depth",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "out_hidden_size",
    "num_position_embeddings",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The tower's shape, from a checkpoint's `vision_config`."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    num_position_embeddings: int
    geometry: Geometry
    deepstack_blocks: tuple[int, ...]
    rope_theta: float

    def __post_init__(self) -> None:
        if self.hidden_size % (4 * self.num_heads):
            raise ValueError("vision_config: hidden_size must be a multiple of 4 x num_heads")
        if self.table_side**2 != self.num_position_embeddings:
            raise ValueError("vision_config: num_position_embeddings must be a square")
        if any(not 0 <= block < self.depth for block in self.deepstack_blocks):
            raise ValueError(f"vision_config: deepstack_visual_indexes beyond depth {self.depth}")

    @property
    def head_dim(self) -> int:
        """Numbers of one head."""
        return self.hidden_size // self.num_heads

    @property
    def table_side(self) -> int:
        """Places along one side of the learned positions."""
        return isqrt(self.num_position_embeddings)

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> VisionConfig:
        """Reads `vision_config`.

        Raises:
            ValueError: A field is missing, or asks for what this build lacks.
        """
        check_activation(config, "gelu_pytorch_tanh")
        return cls(
            **read_sizes(config, *_SIZES),
            geometry=Geometry.from_hf(config, patch=16),
            deepstack_blocks=tuple(map(int, config.get("deepstack_visual_indexes", (8, 16, 24)))),
            rope_theta=read_rope_theta(config),
        )


class Qwen3VisionTower(VisionTower):
    """See `VisionTower`."""

    family = "qwen3_vl"
    prefixes = ("visual.", "model.visual.")

    def __init__(self, config: VisionConfig, *, attention: str = "fused") -> None:
        super().__init__()
        self.config = config
        self.geometry = config.geometry
        self.hidden_size = config.out_hidden_size
        self.levels = 1 + len(config.deepstack_blocks)
        backend = load_attention(attention)
        self.patch_embed = PatchEmbed(config.geometry, config.hidden_size)
        # Not drawn first: on no device that has torch import its compiler, a second of every start.
        table = torch.empty(config.num_position_embeddings, config.hidden_size)
        self.pos_embed = nn.Embedding.from_pretrained(table)
        self.blocks = nn.ModuleList(Block(config, backend) for _ in range(config.depth))
        self.merger = PatchMerger(config, joined_norm=False)
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(config, joined_norm=True) for _ in config.deepstack_blocks
        )
        self._layouts = frame_layouts(
            FrameShape(
                merge=config.geometry.merge,
                head_dim=config.head_dim,
                theta=config.rope_theta,
                table_side=config.table_side,
                read=TableReads.bilinear,
            )
        )

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Qwen3VisionTower:
        """See `VisionTower`."""
        return cls(VisionConfig.from_hf(config.get("vision_config") or {}))

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """See `VisionTower`."""
        layout = self._layouts.of(grids, patches.device)
        x_NC = self.patch_embed(patches)
        x_NC = x_NC + layout.learned(self.pos_embed.weight).to(x_NC.dtype)
        if x_NC.dtype is torch.float16:
            x_NC = x_NC.float()  # the residual stream may outgrow float16
        deeper = {}
        mergers = dict(zip(self.config.deepstack_blocks, self.deepstack_merger_list, strict=True))
        for index, block in enumerate(self.blocks):
            x_NC = block(x_NC, layout.frames, layout.angles)
            if index in mergers:
                deeper[index] = mergers[index](x_NC)
        levels = [self.merger(x_NC), *(deeper[index] for index in self.config.deepstack_blocks)]
        return torch.cat(levels, dim=-1)


class MLP(nn.Module):
    """Two linear layers around the tanh form of GELU."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.linear_fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x_NC: Tensor) -> Tensor:
        """Returns [N, C]."""
        out: Tensor = self.linear_fc2(F.gelu(self.linear_fc1(x_NC), approximate="tanh"))
        return out


class Block(nn.Module):
    """Pre-norm attention and feed-forward; the residual keeps the input's dtype."""

    def __init__(self, config: VisionConfig, backend: SegmentAttention) -> None:
        super().__init__()
        self.norm1 = LayerNorm(config.hidden_size)
        self.norm2 = LayerNorm(config.hidden_size)
        self.attn = JoinedAttention(config.hidden_size, config.num_heads, backend)
        self.mlp = MLP(config)

    def forward(self, x_NC: Tensor, segments: Segments, angles: Angles) -> Tensor:
        """Returns [N, C]."""
        x_NC = x_NC + self.attn(self.norm1(x_NC), segments, angles)
        out: Tensor = x_NC + self.mlp(self.norm2(x_NC))
        return out


class PatchMerger(nn.Module):
    """Joins the patches of a merge cell into one vector of the language model's width.

    Args:
        config: The tower.
        joined_norm: Normalise the joined patches; else each before they are joined.
    """

    def __init__(self, config: VisionConfig, *, joined_norm: bool) -> None:
        super().__init__()
        self._joined = config.hidden_size * config.geometry.merge**2
        self._joined_norm = joined_norm
        self.norm = LayerNorm(self._joined if joined_norm else config.hidden_size)
        self.linear_fc1 = nn.Linear(self._joined, self._joined)
        self.linear_fc2 = nn.Linear(self._joined, config.out_hidden_size)

    def forward(self, x_NC: Tensor) -> Tensor:
        """[N, C] to [R, out_hidden_size]."""
        if self._joined_norm:
            x_RC = self.norm(x_NC.view(-1, self._joined))
        else:
            x_RC = self.norm(x_NC).view(-1, self._joined)
        out: Tensor = self.linear_fc2(F.gelu(self.linear_fc1(x_RC)))
        return out
