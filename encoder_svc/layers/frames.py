"""Layout of a batch whose tokens attend within whole frames: angles, segments, learned positions.

All of it follows from the grids alone, so it is made once for a list of grids and kept on the
device. Shape suffixes: N patches, C hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from chiasm.plan import Grid
from encoder_svc.layers.attention.base import Segments
from encoder_svc.layers.layouts import KeptLayouts
from encoder_svc.layers.rotary import Angles, axial_angles


@dataclass(frozen=True, slots=True)
class Places:
    """Row and column of every patch of a batch, and the size of the frame it belongs to."""

    y_N: Tensor
    x_N: Tensor
    height_N: Tensor
    width_N: Tensor

    @classmethod
    def of(cls, grids: Sequence[Grid], merge: int) -> Places:
        """Patches arrive frame by frame, within a frame by merge cell."""
        ys, xs, heights, widths = [], [], [], []
        for grid in grids:
            y, x = torch.meshgrid(torch.arange(grid.h), torch.arange(grid.w), indexing="ij")
            ys.append(_by_cell(y, merge).repeat(grid.t))
            xs.append(_by_cell(x, merge).repeat(grid.t))
            heights.append(torch.full((grid.patches,), grid.h))
            widths.append(torch.full((grid.patches,), grid.w))
        return cls(torch.cat(ys), torch.cat(xs), torch.cat(heights), torch.cat(widths))


@dataclass(frozen=True, slots=True)
class TableReads:
    """What each patch takes from a square table: entries and float32 weights, each [N, taps]."""

    entries: Tensor
    weights: Tensor

    @classmethod
    def bilinear(cls, places: Places, side: int, device: torch.device) -> TableReads:
        """Two taps an axis; the first and the last patch of a frame are the table's corners."""
        rows, row_weights = _corner_aligned(places.y_N, places.height_N, side)
        columns, column_weights = _corner_aligned(places.x_N, places.width_N, side)
        return cls._product(rows, row_weights, columns, column_weights, side, device)

    @classmethod
    def bicubic(cls, places: Places, side: int, device: torch.device) -> TableReads:
        """Four taps an axis at the patches' centres (Keys 1981, a = -0.75), edges repeated."""
        rows, row_weights = _cubic(places.y_N, places.height_N, side)
        columns, column_weights = _cubic(places.x_N, places.width_N, side)
        return cls._product(rows, row_weights, columns, column_weights, side, device)

    @classmethod
    def _product(
        cls,
        rows: Tensor,
        row_w: Tensor,
        columns: Tensor,
        column_w: Tensor,
        side: int,
        device: torch.device,
    ) -> TableReads:
        entries = rows[:, :, None] * side + columns[:, None, :]
        weights = row_w[:, :, None] * column_w[:, None, :]
        return cls(entries.flatten(1).to(device), weights.flatten(1).to(device))

    def of(self, table_EC: Tensor) -> Tensor:
        """[N, C], float32 where the table is narrower."""
        return (table_EC[self.entries] * self.weights.unsqueeze(-1)).sum(1)


def _by_cell(plane: Tensor, merge: int) -> Tensor:
    cells: Tensor = plane.unflatten(0, (-1, merge)).unflatten(2, (-1, merge))
    return cells.transpose(1, 2).flatten()


def _corner_aligned(at_N: Tensor, size_N: Tensor, side: int) -> tuple[Tensor, Tensor]:
    source = at_N.float() * (side - 1) / (size_N - 1).clamp(min=1)
    lower = source.floor()
    taps = lower.long()[:, None] + torch.arange(2)
    distance = (source - lower)[:, None] - torch.arange(2)
    return taps.clamp(max=side - 1), 1 - distance.abs()


def _cubic(at_N: Tensor, size_N: Tensor, side: int) -> tuple[Tensor, Tensor]:
    source = (at_N.float() + 0.5) * side / size_N - 0.5
    lower = source.floor()
    offsets = torch.arange(-1, 3)
    taps = lower.long()[:, None] + offsets
    d = ((source - lower)[:, None] - offsets).abs()
    a = -0.75
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return taps.clamp(0, side - 1), torch.where(d <= 1, near, far)


@dataclass(frozen=True, slots=True)
class FrameShape:
    """What a tower's angles and learned positions are."""

    merge: int
    head_dim: int
    theta: float
    table_side: int = 0
    """Places along one side of the learned positions; 0 = none are learned."""
    read: Callable[[Places, int, torch.device], TableReads] = TableReads.bilinear
    """How these are read between their places."""


@dataclass(frozen=True, slots=True)
class FrameLayout:
    """Made on the CPU, kept on the device."""

    angles: Angles
    positions: TableReads | None
    frames: Segments

    def learned(self, table_EC: Tensor) -> Tensor:
        """Learned positions of every patch, [N, C]."""
        assert self.positions is not None, "this tower learns no positions"
        return self.positions.of(table_EC)

    @classmethod
    def of(cls, shape: FrameShape, grids: Sequence[Grid], device: torch.device) -> FrameLayout:
        """Lays the grids out one after the other."""
        places = Places.of(grids, shape.merge)
        cos, sin = axial_angles(places.y_N, places.x_N, head_dim=shape.head_dim, theta=shape.theta)
        lengths = [grid.h * grid.w for grid in grids for _ in range(grid.t)]
        return cls(
            angles=Angles(cos.to(device), sin.to(device)),
            positions=shape.read(places, shape.table_side, device) if shape.table_side else None,
            frames=Segments.from_lengths(lengths, device),
        )


def frame_layouts(shape: FrameShape) -> KeptLayouts[FrameLayout]:
    """Lays batches out for a tower of this shape."""
    return KeptLayouts(partial(FrameLayout.of, shape))
