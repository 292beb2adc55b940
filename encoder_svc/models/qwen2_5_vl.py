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
import torch.nn.functional as F
from torch import Tensor, nn

from chiasm.plan import Grid
from encoder_svc.geometry import Geometry
from encoder_svc.layers.attention.base import SegmentAttention, Segments
from encoder_svc.layers.attention.registry import load_attention
from encoder_svc.layers.mlp import GatedMLP
from encoder_svc.layers.norm import RMSNorm
from encoder_svc.layers.rotary import axial_angles, rotate
from encoder_svc.models.base import VisionTower


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
        if (act := config.get("hidden_act", "silu")) != "silu":
            raise ValueError(f"vision_config: hidden_act {act!r} is not supported")
        try:
            sizes = {
                name: int(config[name])
                for name in (
                    "depth",
                    "hidden_size",
                    "intermediate_size",
                    "num_heads",
                    "out_hidden_size",
                )
            }
        except KeyError as error:
            raise ValueError(f"vision_config: {error.args[0]} is missing") from None
        rope = config.get("rope_parameters") or {}
        return cls(
            **sizes,
            geometry=Geometry(
                patch=int(config.get("patch_size", 14)),
                temporal_patch=int(config.get("temporal_patch_size", 2)),
                merge=int(config.get("spatial_merge_size", 2)),
                channels=int(config.get("in_channels", config.get("in_chans", 3))),
            ),
            window_size=int(config.get("window_size", 112)),
            # Some files hold them as strings; compared as such, every block would be windowed.
            full_blocks=frozenset(map(int, config.get("fullatt_block_indexes", (7, 15, 23, 31)))),
            rope_theta=float(rope.get("rope_theta", 10000.0)),
        )


class Qwen25VisionTower(VisionTower):
    """See `VisionTower`."""

    family = "qwen2_5_vl"
    prefixes = ("visual.", "model.visual.")
    levels = 1

    def __init__(self, config: VisionConfig, *, attention: str = "reference") -> None:
        super().__init__()
        self.config = config
        self.geometry = config.geometry
        self.hidden_size = config.out_hidden_size
        backend = load_attention(attention)
        self.patch_embed = PatchEmbed(config)
        self.blocks = nn.ModuleList(Block(config, backend) for _ in range(config.depth))
        self.merger = PatchMerger(config)

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
        layout = _Layout.of(self.config, grids, patches.device)
        x_NC = layout.to_windows(self.patch_embed(patches))
        if x_NC.dtype is torch.float16:
            x_NC = x_NC.float()  # the residual stream outgrows float16 in late blocks
        angles = axial_angles(
            layout.y_N, layout.x_N, head_dim=self.config.head_dim, theta=self.config.rope_theta
        )
        for index, block in enumerate(self.blocks):
            full = index in self.config.full_blocks
            x_NC = block(x_NC, layout.frames if full else layout.windows, angles)
        rows: Tensor = self.merger(x_NC)
        return rows[layout.back_R]


class PatchEmbed(nn.Module):
    """The reference's Conv3d whose stride is its kernel: one matrix product."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.geometry.patch_values, config.hidden_size, bias=False)

    def forward(self, patches: Tensor) -> Tensor:
        """[N, patch values] of any float dtype to [N, C]."""
        out: Tensor = self.proj(patches.to(self.proj.weight.dtype))
        return out


class Attention(nn.Module):
    """Multi-head attention within segments, rotary in two dimensions."""

    def __init__(self, config: VisionConfig, backend: SegmentAttention) -> None:
        super().__init__()
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)
        self._heads = (3, config.num_heads, config.head_dim)
        self._attend = backend

    def forward(self, x_NC: Tensor, segments: Segments, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Returns [N, C]."""
        q_NHD, k_NHD, v_NHD = self.qkv(x_NC).unflatten(-1, self._heads).unbind(1)
        attended = self._attend(rotate(q_NHD, *angles), rotate(k_NHD, *angles), v_NHD, segments)
        out: Tensor = self.proj(attended)
        return out


class Block(nn.Module):
    """Pre-norm attention and feed-forward; the residual keeps the input's dtype."""

    def __init__(self, config: VisionConfig, backend: SegmentAttention) -> None:
        super().__init__()
        self.norm1 = RMSNorm(config.hidden_size)
        self.norm2 = RMSNorm(config.hidden_size)
        self.attn = Attention(config, backend)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)

    def forward(self, x_NC: Tensor, segments: Segments, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Returns [N, C]."""
        x_NC = x_NC + self.attn(self.norm1(x_NC), segments, angles)
        out: Tensor = x_NC + self.mlp(self.norm2(x_NC))
        return out


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

    def forward(self, x_NC: Tensor) -> Tensor:
        """[N, C] to [R, out_hidden_size]."""
        out: Tensor = self.mlp(self.ln_q(x_NC).view(-1, self._joined))
        return out


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where each token of a batch goes, and whom it attends to. Made once a forward, on the CPU."""

    order_R: Tensor  # row at each place in window order
    back_R: Tensor  # the inverse
    y_N: Tensor  # patch coordinates, in window order
    x_N: Tensor
    windows: Segments
    frames: Segments
    cell: int  # patches of a merge cell

    @classmethod
    def of(cls, config: VisionConfig, grids: Sequence[Grid], device: torch.device) -> _Layout:
        merge = config.geometry.merge
        orders, ys, xs = [], [], []
        windows: list[int] = []
        frames: list[int] = []
        first = 0
        for grid in grids:
            order, lengths = _window_order(grid.h // merge, grid.w // merge, config.window_cells)
            y, x = _coordinates(grid, merge)
            frame_rows = len(order)
            for _ in range(grid.t):
                orders.append(order + first)
                first += frame_rows
            ys.append(y[order].flatten().repeat(grid.t))
            xs.append(x[order].flatten().repeat(grid.t))
            windows += [length * merge * merge for length in lengths] * grid.t
            frames += [grid.h * grid.w] * grid.t
        order_R = torch.cat(orders)
        return cls(
            order_R=order_R.to(device),
            back_R=torch.argsort(order_R).to(device),
            y_N=torch.cat(ys).to(device),
            x_N=torch.cat(xs).to(device),
            windows=Segments.from_lengths(windows, device),
            frames=Segments.from_lengths(frames, device),
            cell=merge * merge,
        )

    def to_windows(self, x_NC: Tensor) -> Tensor:
        cells: Tensor = x_NC.unflatten(0, (-1, self.cell))
        return cells[self.order_R].flatten(0, 1)


def _window_order(height: int, width: int, side: int) -> tuple[Tensor, list[int]]:
    """Cells of one frame in window order, and the cells of each window; none is empty.

    Within a frame whole windows come first, then the edges, so that equal lengths lie together.
    """
    cells = F.pad(
        torch.arange(height * width).view(height, width),
        (0, -width % side, 0, -height % side),
        value=-1,
    )
    tiles = cells.unflatten(0, (-1, side)).unflatten(2, (-1, side)).transpose(1, 2).flatten(0, 1)
    tiles = tiles.flatten(1)
    lengths, by_length = (tiles >= 0).sum(1).sort(descending=True, stable=True)
    tiles = tiles[by_length]
    return tiles[tiles >= 0], lengths.tolist()


def _coordinates(grid: Grid, merge: int) -> tuple[Tensor, Tensor]:
    """Patch y and x of one frame, [cells, merge * merge], in the order patches arrive."""
    y, x = torch.meshgrid(torch.arange(grid.h), torch.arange(grid.w), indexing="ij")
    return _by_cell(y, merge), _by_cell(x, merge)


def _by_cell(plane: Tensor, merge: int) -> Tensor:
    cells: Tensor = plane.unflatten(0, (-1, merge)).unflatten(2, (-1, merge))
    return cells.transpose(1, 2).reshape(-1, merge * merge)
