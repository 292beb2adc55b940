"""The vision tower of Qwen2-VL (Wang et al. 2024), our own modules.

Every block attends within a whole temporal group; places are told by rotary angles alone.
Shape suffixes: N patches, R rows (merge cells), C hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from chiasm.plan import Grid
from encoder_svc.geometry import Geometry
from encoder_svc.layers.attention.base import SegmentAttention, Segments
from encoder_svc.layers.attention.registry import load_attention
from encoder_svc.layers.frames import FrameShape, frame_layouts
from encoder_svc.layers.joined_attention import JoinedAttention
from encoder_svc.layers.norm import LayerNorm
from encoder_svc.layers.patch_embed import PatchEmbed
from encoder_svc.layers.rotary import Angles
from encoder_svc.models.base import VisionTower
from encoder_svc.models.vision_config import check_activation, read_rope_theta, read_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The tower's shape, from a checkpoint's `vision_config`."""

    depth: int
    embed_dim: int
    num_heads: int
    mlp_ratio: float
    out_hidden_size: int
    geometry: Geometry
    rope_theta: float

    def __post_init__(self) -> None:
        if self.embed_dim % (4 * self.num_heads):
            raise ValueError("vision_config: embed_dim must be a multiple of 4 x num_heads")

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> VisionConfig:
        """Reads `vision_config`; its `hidden_size` is the language model's.

        Raises:
            ValueError: A field is missing, or asks for what this build lacks.
        """
        check_activation(config, "quick_gelu")
        return cls(
            depth=int(config.get("depth", 32)),
            embed_dim=int(config.get("embed_dim", 1280)),
            num_heads=int(config.get("num_heads", 16)),
            mlp_ratio=float(config.get("mlp_ratio", 4)),
            out_hidden_size=read_sizes(config, "hidden_size")["hidden_size"],
            geometry=Geometry.from_hf(config, patch=14),
            rope_theta=read_rope_theta(config),
        )


class Qwen2VisionTower(VisionTower):
    """See `VisionTower`."""

    family = "qwen2_vl"
    prefixes = ("visual.", "model.visual.")
    levels = 1

    def __init__(self, config: VisionConfig, *, attention: str = "fused") -> None:
        super().__init__()
        self.config = config
        self.geometry = config.geometry
        self.hidden_size = config.out_hidden_size
        backend = load_attention(attention)
        self.patch_embed = PatchEmbed(config.geometry, config.embed_dim, bias=False)
        self.blocks = nn.ModuleList(Block(config, backend) for _ in range(config.depth))
        self.merger = PatchMerger(config)
        self._layouts = frame_layouts(
            FrameShape(
                merge=config.geometry.merge,
                head_dim=config.embed_dim // config.num_heads,
                theta=config.rope_theta,
            )
        )

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Qwen2VisionTower:
        """See `VisionTower`."""
        return cls(VisionConfig.from_hf(config.get("vision_config") or {}))

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """See `VisionTower`."""
        layout = self._layouts.of(grids, patches.device)
        x_NC = self.patch_embed(patches)
        if x_NC.dtype is torch.float16:
            x_NC = x_NC.float()  # the residual stream may outgrow float16
        for block in self.blocks:
            x_NC = block(x_NC, layout.frames, layout.angles)
        rows: Tensor = self.merger(x_NC)
        return rows


class MLP(nn.Module):
    """Two linear layers around x sigmoid(1.702 x), a quick stand-in for GELU."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(size, width)
        self.fc2 = nn.Linear(width, size)

    def forward(self, x_NC: Tensor) -> Tensor:
        """Returns [N, C]."""
        wide = self.fc1(x_NC)
        out: Tensor = self.fc2(wide * torch.sigmoid(1.702 * wide))
        return out


class Block(nn.Module):
    """Pre-norm attention and feed-forward; the residual keeps the input's dtype."""

    def __init__(self, config: VisionConfig, backend: SegmentAttention) -> None:
        super().__init__()
        size = config.embed_dim
        self.norm1 = LayerNorm(size)
        self.norm2 = LayerNorm(size)
        self.attn = JoinedAttention(size, config.num_heads, backend)
        self.mlp = MLP(size, int(size * config.mlp_ratio))

    def forward(self, x_NC: Tensor, segments: Segments, angles: Angles) -> Tensor:
        """Returns [N, C]."""
        x_NC = x_NC + self.attn(self.norm1(x_NC), segments, angles)
        out: Tensor = x_NC + self.mlp(self.norm2(x_NC))
        return out


class PatchMerger(nn.Module):
    """Joins the patches of a merge cell into one row of the language model's width."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self._joined = config.embed_dim * config.geometry.merge**2
        self.ln_q = LayerNorm(config.embed_dim)
        self.mlp = nn.Sequential(
            nn.Linear(self._joined, self._joined),
            nn.GELU(),
            nn.Linear(self._joined, config.out_hidden_size),
        )

    def forward(self, x_NC: Tensor) -> Tensor:
        """[N, C] to [R, out_hidden_size]."""
        out: Tensor = self.mlp(self.ln_q(x_NC).view(-1, self._joined))
        return out
