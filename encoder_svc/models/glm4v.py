"""The vision tower of GLM-4.1V, 4.5V and 4.6V (GLM-V Team 2025), our own modules.

Every block attends within a whole temporal group. Learned positions are read by bicubic
interpolation; a convolution joins the patches of a merge cell before the merger.
Shape suffixes: N patches, R rows (merge cells), C hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from encoder_svc.layers.mlp import GatedMLP
from encoder_svc.layers.norm import LayerNorm, RMSNorm
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
    "image_size",
)
_MERGER_EPS = 1e-5  # the one norm whose epsilon no config names


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The tower's shape, from a checkpoint's `vision_config`."""

    depth: int
    hidden_size: int
    intermediate_size: int
    """Of the merger; blocks are as wide inside as the language model."""
    num_heads: int
    out_hidden_size: int
    image_size: int
    geometry: Geometry
    eps: float
    qkv_bias: bool
    rope_theta: float

    def __post_init__(self) -> None:
        if self.hidden_size % (4 * self.num_heads):
            raise ValueError("vision_config: hidden_size must be a multiple of 4 x num_heads")

    @property
    def table_side(self) -> int:
        """Places along one side of the learned positions."""
        return self.image_size // self.geometry.patch

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> VisionConfig:
        """Reads `vision_config`.

        Raises:
            ValueError: A field is missing, or asks for what this build lacks.
        """
        check_activation(config, "silu")
        return cls(
            **read_sizes(config, *_SIZES),
            geometry=Geometry.from_hf(config, patch=14),
            eps=float(config.get("rms_norm_eps", 1e-5)),
            qkv_bias=bool(config.get("attention_bias", False)),
            rope_theta=read_rope_theta(config),
        )


class Glm4vVisionTower(VisionTower):
    """See `VisionTower`."""

    family = "glm4v"
    prefixes = ("visual.", "model.visual.")
    levels = 1

    def __init__(self, config: VisionConfig, *, attention: str = "fused") -> None:
        super().__init__()
        size = config.hidden_size
        self.config = config
        self.geometry = config.geometry
        self.hidden_size = config.out_hidden_size
        backend = load_attention(attention)
        self.patch_embed = PatchEmbed(config.geometry, size)
        self.post_conv_layernorm = RMSNorm(size, eps=config.eps)
        self.embeddings = Positions(config.table_side**2, size)
        self.blocks = nn.ModuleList(Block(config, backend) for _ in range(config.depth))
        self.post_layernorm = RMSNorm(size, eps=config.eps)
        self.downsample = CellJoin(config)
        self.merger = Merger(config)
        self._layouts = frame_layouts(
            FrameShape(
                merge=config.geometry.merge,
                head_dim=size // config.num_heads,
                theta=config.rope_theta,
                table_side=config.table_side,
                read=TableReads.bicubic,
            )
        )

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Glm4vVisionTower:
        """See `VisionTower`."""
        return cls(VisionConfig.from_hf(config.get("vision_config") or {}))

    def wide_parameters(self) -> frozenset[str]:
        """See `VisionTower`."""
        names = (name for name, _ in self.named_parameters())
        return frozenset(name for name in names if ".down_proj." in f".{name}")

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """See `VisionTower`."""
        layout = self._layouts.of(grids, patches.device)
        table = self.embeddings.position_embedding.weight
        x_NC = self.post_conv_layernorm(self.patch_embed(patches))
        x_NC = x_NC + layout.learned(table).to(x_NC.dtype)
        if x_NC.dtype is torch.float16:
            x_NC = x_NC.float()  # the residual stream may outgrow float16
        delta_NC = torch.zeros_like(x_NC)
        for block in self.blocks:
            x_NC, delta_NC = block(x_NC, delta_NC, layout.frames, layout.angles)
        _, normed_NC = self.post_layernorm.after(x_NC, delta_NC)
        rows: Tensor = self.merger(self.downsample(normed_NC))
        return rows


class Positions(nn.Module):
    """The learned positions of a square grid."""

    def __init__(self, count: int, hidden_size: int) -> None:
        super().__init__()
        self.position_embedding = nn.Embedding.from_pretrained(torch.empty(count, hidden_size))


class Block(nn.Module):
    """Pre-norm attention and feed-forward; the residual keeps the input's dtype.

    What a block adds last is added by the norm that follows, in one pass: it travels as a delta.
    """

    def __init__(self, config: VisionConfig, backend: SegmentAttention) -> None:
        super().__init__()
        size = config.hidden_size
        self.norm1 = RMSNorm(size, eps=config.eps)
        self.norm2 = RMSNorm(size, eps=config.eps)
        self.attn = JoinedAttention(
            size, config.num_heads, backend, qkv_bias=config.qkv_bias, out_bias=False
        )
        self.mlp = GatedMLP(size, config.out_hidden_size, bias=False)

    def forward(
        self, x_NC: Tensor, delta_NC: Tensor, segments: Segments, angles: Angles
    ) -> tuple[Tensor, Tensor]:
        """The residual stream and what is to be added to it, before and after, [N, C] each."""
        x_NC, normed_NC = self.norm1.after(x_NC, delta_NC)
        x_NC, normed_NC = self.norm2.after(x_NC, self.attn(normed_NC, segments, angles))
        return x_NC, self.mlp(normed_NC)


class CellJoin(nn.Module):
    """The reference's Conv2d over a merge cell, whose stride is its kernel: one matrix product."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self._cell = config.geometry.merge**2
        joined = config.hidden_size * self._cell
        self.weight = nn.Parameter(torch.empty(config.out_hidden_size, joined))
        self.bias = nn.Parameter(torch.empty(config.out_hidden_size))

    def finish(self) -> None:
        """Checkpoints have channels outside, places of the cell inside; patches lie otherwise."""
        by_place = self.weight.data.unflatten(1, (-1, self._cell)).transpose(1, 2)
        self.weight.data = by_place.flatten(1).contiguous()

    def forward(self, x_NC: Tensor) -> Tensor:
        """[N, C] to [R, out_hidden_size]. After `finish`."""
        cells_RC = x_NC.view(-1, self.weight.shape[1])
        return F.linear(cells_RC.to(self.weight.dtype), self.weight, self.bias)


class Merger(nn.Module):
    """What rows pass through before they leave."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size = config.out_hidden_size
        self.proj = nn.Linear(size, size, bias=False)
        self.post_projection_norm = LayerNorm(size, eps=_MERGER_EPS)
        self.gate_proj = nn.Linear(size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, size, bias=False)

    def forward(self, x_RC: Tensor) -> Tensor:
        """Returns [R, out_hidden_size]."""
        x_RC = F.gelu(self.post_projection_norm(self.proj(x_RC)))
        wide = self.down_proj.weight.dtype
        gate, up = self.gate_proj(x_RC).to(wide), self.up_proj(x_RC).to(wide)
        out: Tensor = self.down_proj(F.silu(gate) * up)
        return out
