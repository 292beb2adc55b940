"""The vision tower of Qwen2.5-VL (Bai et al. 2025), our own modules.

Most blocks attend within windows, a few within a whole temporal group. Tokens are put in window
order once at the start, by whole merge cells, and rows are put back once at the end.
Shape suffixes: N patches, R rows (merge cells), H heads, D head dim, C hidden size.
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
from encoder_svc.layers.joined_attention import JoinedAttention
from encoder_svc.layers.mlp import GatedMLP
from encoder_svc.layers.norm import RMSNorm
from encoder_svc.layers.patch_embed import PatchEmbed
from encoder_svc.layers.rotary import Angles
from encoder_svc.layers.windows import WindowShape, window_layouts
from encoder_svc.models.base import VisionTower
from encoder_svc.models.vision_config import check_activation, read_rope_theta, read_sizes

_SIZES = ("depth", "hidden_size", "intermediate_size", "num_heads", "out_hidden_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The tower's shape, from a checkpoint's `vision_config`."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    geometry: Geometry
    window_size: int
    full_blocks: frozenset[int]
    rope_theta: float

    def __post_init__(self) -> None:
        if self.hidden_size % (4 * self.num_heads):
            raise ValueError("vision_config: hidden_size must be a multiple of 4 x num_heads")
        if self.window_cells < 1:
            raise ValueError("vision_config: window_size holds no merge cell")

    @property
    def head_dim(self) -> int:
        """Numbers of one head."""
        return self.hidden_size // self.num_heads

    @property
    def window_cells(self) -> int:
        """Merge cells along one side of a window."""
        return self.window_size // self.geometry.merge // self.geometry.patch

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> VisionConfig:
        """Reads `vision_config` in any dialect of the family.

        Raises:
            ValueError: A field is missing, or asks for what this build lacks.
        """
        check_activation(config, "silu")
        return cls(
            **read_sizes(config, *_SIZES),
            geometry=Geometry.from_hf(config, patch=14),
            window_size=int(config.get("window_size", 112)),
            # Some files hold them as strings; compared as such, every block would be windowed.
            full_blocks=frozenset(map(int, config.get("fullatt_block_indexes", (7, 15, 23, 31)))),
            rope_theta=read_rope_theta(config),
        )


class Qwen25VisionTower(VisionTower):
    """See `VisionTower`."""

    family = "qwen2_5_vl"
    prefixes = ("visual.", "model.visual.")
    levels = 1

    def __init__(self, config: VisionConfig, *, attention: str = "fused") -> None:
        super().__init__()
        self.config = config
        self.geometry = config.geometry
        self.hidden_size = config.out_hidden_size
        backend = load_attention(attention)
        self.patch_embed = PatchEmbed(config.geometry, config.hidden_size, bias=False)
        self.blocks = nn.ModuleList(Block(config, backend) for _ in range(config.depth))
        self.merger = PatchMerger(config)
        self._layouts = window_layouts(
            WindowShape(
                merge=config.geometry.merge,
                window_cells=config.window_cells,
                head_dim=config.head_dim,
                theta=config.rope_theta,
            )
        )

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Qwen25VisionTower:
        """See `VisionTower`."""
        return cls(VisionConfig.from_hf(config.get("vision_config") or {}))

    def wide_parameters(self) -> frozenset[str]:
        """See `VisionTower`."""
        names = (name for name, _ in self.named_parameters())
        return frozenset(name for name in names if ".mlp.down_proj." in name)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """See `VisionTower`."""
        layout = self._layouts.of(grids, patches.device)
        x_NC = layout.to_windows(self.patch_embed(patches))
        if x_NC.dtype is torch.float16:
            x_NC = x_NC.float()  # the residual stream outgrows float16 in late blocks
        delta_NC = torch.zeros_like(x_NC)
        for index, block in enumerate(self.blocks):
            full = index in self.config.full_blocks
            segments = layout.frames if full else layout.windows
            x_NC, delta_NC = block(x_NC, delta_NC, segments, layout.angles)
        rows: Tensor = self.merger(x_NC, delta_NC)
        return rows[layout.back_R]


class Block(nn.Module):
    """Pre-norm attention and feed-forward; the residual keeps the input's dtype.

    What a block adds last is added by the norm that follows, in one pass: it travels as a delta.
    """

    def __init__(self, config: VisionConfig, backend: SegmentAttention) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.hidden_size)
        self.norm2 = RMSNorm(config.hidden_size)
        self.attn = JoinedAttention(config.hidden_size, config.num_heads, backend)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def forward(
        self, x_NC: Tensor, delta_NC: Tensor, segments: Segments, angles: Angles
    ) -> tuple[Tensor, Tensor]:
        """The residual stream and what is to be added to it, before and after, [N, C] each."""
        x_NC, normed_NC = self.norm1.after(x_NC, delta_NC)
        x_NC, normed_NC = self.norm2.after(x_NC, self.attn(normed_NC, segments, angles))
        return x_NC, self.mlp(normed_NC)


class PatchMerger(nn.Module):
    """Joins the patches of a merge cell into one row of the language model's width."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self._joined = config.hidden_size * config.geometry.merge**2
        self.ln_q = RMSNorm(config.hidden_size)
        self.mlp = nn.Sequential(
            nn.Linear(self._joined, self._joined),
            nn.GELU(),
            nn.Linear(self._joined, config.out_hidden_size),
        )

    def forward(self, x_NC: Tensor, delta_NC: Tensor) -> Tensor:
        """The residual stream and the last block's delta, [N, C] each, to [R, out_hidden_size]."""
        _, normed_NC = self.ln_q.after(x_NC, delta_NC)
        out: Tensor = self.mlp(normed_NC.view(-1, self._joined))
        return out
