"""Window order of a batch: where each token goes, whom it attends to, and its angles.

All of it follows from the grids alone, so it is made once for a list of grids and kept on the
device: a fleet sees the same few sizes over and over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from chiasm.plan import Grid
from encoder_svc.layers.attention.base import Segments
from encoder_svc.layers.layouts import KeptLayouts
from encoder_svc.layers.rotary import Angles, axial_angles


@dataclass(frozen=True, slots=True)
class WindowShape:
    """What a tower's windows and angles are."""

    merge: int
    window_cells: int
    """Merge cells along one side of a window."""
    head_dim: int
    theta: float


@dataclass(frozen=True, slots=True)
class WindowLayout:
    """Made on the CPU, kept on the device. R merge cells, N patches, both in window order."""

    order_R: Tensor  # cell at each place in window order
    back_R: Tensor  # the inverse
    angles: Angles
    windows: Segments
    frames: Segments
    cell: int  # patches of a merge cell

    @classmethod
    def of(cls, shape: WindowShape, grids: Sequence[Grid], device: torch.device) -> WindowLayout:
        """Lays the grids out one after the other; no window spans two frames."""
        merge = shape.merge
        orders, ys, xs = [], [], []
        windows: list[int] = []
        frames: list[int] = []
        first = 0
        for grid in grids:
            order, lengths = window_order(grid.h // merge, grid.w // merge, shape.window_cells)
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
        cos, sin = axial_angles(
            torch.cat(ys), torch.cat(xs), head_dim=shape.head_dim, theta=shape.theta
        )
        return cls(
            order_R=order_R.to(device),
            back_R=torch.argsort(order_R).to(device),
            angles=Angles(cos.to(device), sin.to(device)),
            windows=Segments.from_lengths(windows, device),
            frames=Segments.from_lengths(frames, device),
            cell=merge * merge,
        )

    def to_windows(self, x_NC: Tensor) -> Tensor:
        """Tokens in the order of patches to window order, by whole cells."""
        cells: Tensor = x_NC.unflatten(0, (-1, self.cell))
        return cells[self.order_R].flatten(0, 1)


def window_layouts(shape: WindowShape) -> KeptLayouts[WindowLayout]:
    """Lays batches out for a tower of this shape."""
    return KeptLayouts(partial(WindowLayout.of, shape))


def window_order(height: int, width: int, side: int) -> tuple[Tensor, list[int]]:
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
