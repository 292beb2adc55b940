"""How a plan maps to patches, rows and units of work. Pure arithmetic: no pixels, no tensors.

A clip's units lie at places that its plan fixes (`chiasm.runs`), and a run consists of whole units:
the shapes that the tower sees depend on the plan alone, never on how a clip was cut into runs, so
its rows are equal to the bit however many workers made them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from chiasm.errors import InvalidRequest
from chiasm.plan import Grid, MediaPlan, Modality, Span
from chiasm.runs import unit_edges


@dataclass(frozen=True, slots=True)
class Geometry:
    """The tower's cell sizes: a patch is `temporal_patch` frames x `patch` x `patch` pixels, and
    `merge` x `merge` patches make one row."""

    patch: int
    temporal_patch: int
    merge: int
    channels: int = 3
    tile: int = 0
    """Patches along a tile, where every temporal group is one; 0 = groups of any size."""

    @classmethod
    def from_hf(cls, vision: Mapping[str, Any], *, patch: int) -> Geometry:
        """Reads a `vision_config` of native resolution; `patch` where it names none."""
        return cls(
            patch=int(vision.get("patch_size", patch)),
            temporal_patch=int(vision.get("temporal_patch_size", 2)),
            merge=int(vision.get("spatial_merge_size", 2)),
            channels=int(vision.get("in_channels", vision.get("in_chans", 3))),
        )

    @property
    def patch_values(self) -> int:
        """Numbers in one flattened patch."""
        return self.channels * self.temporal_patch * self.patch * self.patch

    def blank(self, times: int) -> Grid:
        """A grid that a tower of this geometry takes: so many merge cells a side, or one tile."""
        side = self.tile or times * self.merge
        return Grid(1, side, side)

    def rows(self, patches: int) -> int:
        """Rows that so many patches merge into."""
        return patches // (self.merge * self.merge)


@dataclass(frozen=True, slots=True)
class Unit:
    """Temporal groups [begin, end) of one medium: what is prepared and encoded at once.

    Attention never leaves a temporal group, so the rows of a unit do not depend on its neighbours.
    """

    begin: int
    end: int
    grid: Grid

    @property
    def patches(self) -> int:
        """Patches of the unit."""
        return self.grid.patches


@dataclass(frozen=True, slots=True)
class Run:
    """What one job covers: whole units that fill groups [begin, end) of a medium."""

    begin: int
    end: int
    grid: Grid  # of the whole medium
    group_rows: int

    @property
    def patches(self) -> int:
        """Patches of the run."""
        return (self.end - self.begin) * self.grid.h * self.grid.w

    @property
    def rows(self) -> Span:
        """The run's rows, counted in the whole medium."""
        return Span(self.begin * self.group_rows, self.end * self.group_rows)

    def units(self) -> tuple[Unit, ...]:
        """The run's units, in order."""
        return tuple(
            Unit(begin, end, Grid(end - begin, self.grid.h, self.grid.w))
            for begin, end in pairwise(unit_edges(self.grid))
            if self.begin <= begin and end <= self.end
        )


def segments_of(unit_rows: Sequence[int], *, first: int, most: int) -> tuple[Span, ...]:
    """Rows of the segments that units of so many rows are cut to: none longer than `most`, none
    shared by two units; the first begins at row `first`."""
    segments, begin = [], first
    for rows in unit_rows:
        end = begin + rows
        segments += [Span(at, min(at + most, end)) for at in range(begin, end, most)]
        begin = end
    return tuple(segments)


def resolve_run(geometry: Geometry, plan: MediaPlan, frames: Span | None, rows: Span) -> Run:
    """The groups that `frames` of the plan make.

    Raises:
        InvalidRequest: The plan contradicts itself or does not fit this tower.
    """
    if len(plan.grids) != 1:
        raise InvalidRequest(f"a plan of this family has one grid, got {len(plan.grids)}")
    grid = plan.grids[0]
    _check_grid(geometry, plan, grid)
    run = _frame_run(geometry, plan, grid, frames)
    if rows != run.rows:
        raise InvalidRequest(
            f"the run yields rows [{run.rows.begin}, {run.rows.end}), "
            f"the request says [{rows.begin}, {rows.end})"
        )
    return run


def _check_grid(geometry: Geometry, plan: MediaPlan, grid: Grid) -> None:
    size = (grid.h * geometry.patch, grid.w * geometry.patch)
    if geometry.tile:
        _check_tiles(geometry, plan, grid)
    elif size != (plan.resized_height, plan.resized_width):
        raise InvalidRequest(
            f"a grid of {grid.h}x{grid.w} patches does not make "
            f"{plan.resized_height}x{plan.resized_width} pixels"
        )
    if min(grid.t, grid.h, grid.w) < 1 or grid.h % geometry.merge or grid.w % geometry.merge:
        raise InvalidRequest(f"impossible grid {grid.t}x{grid.h}x{grid.w}")
    if plan.num_rows != geometry.rows(grid.patches):
        raise InvalidRequest(
            f"the grid makes {geometry.rows(grid.patches)} rows, the plan says {plan.num_rows}"
        )
    frames = len(plan.frame_indices) if plan.modality is Modality.VIDEO else 1
    tiled = geometry.tile and plan.modality is Modality.IMAGE
    if not tiled and grid.t != -(-frames // geometry.temporal_patch):
        raise InvalidRequest(f"{frames} frames do not make {grid.t} temporal groups")
    if min(plan.source_height, plan.source_width) < 1:
        raise InvalidRequest("the plan has no source size")


def _check_tiles(geometry: Geometry, plan: MediaPlan, grid: Grid) -> None:
    """Groups are tiles of the resized picture, row by row, and perhaps the whole of it as one."""
    side = geometry.tile * geometry.patch
    rows, columns = plan.resized_height // side, plan.resized_width // side
    if (rows * side, columns * side) != (plan.resized_height, plan.resized_width):
        raise InvalidRequest(
            f"{plan.resized_height}x{plan.resized_width} pixels are no tiles of {side}"
        )
    if (grid.h, grid.w) != (geometry.tile, geometry.tile):
        raise InvalidRequest(f"a tile has {geometry.tile} patches a side, not {grid.h}x{grid.w}")
    tiles = rows * columns
    if plan.modality is Modality.VIDEO and tiles != 1:
        raise InvalidRequest("a frame is one tile")
    if plan.modality is Modality.IMAGE and not tiles <= grid.t <= tiles + (tiles > 1):
        raise InvalidRequest(f"{tiles} tiles do not make {grid.t} groups")


def _frame_run(geometry: Geometry, plan: MediaPlan, grid: Grid, frames: Span | None) -> Run:
    group_rows = geometry.rows(grid.h * grid.w)
    if frames is None:
        return Run(0, grid.t, grid, group_rows)
    count, step = len(plan.frame_indices), geometry.temporal_patch
    if not len(frames) or frames.end > count:
        raise InvalidRequest(f"frame run [{frames.begin}, {frames.end}) of {count} frames")
    begin, end = frames.begin // step, -(-frames.end // step)
    edges = unit_edges(grid)
    whole = begin * step == frames.begin and min(end * step, count) == frames.end
    if not whole or begin not in edges or end not in edges:
        raise InvalidRequest(
            f"frame run [{frames.begin}, {frames.end}) cuts through a unit of this clip"
        )
    return Run(begin, end, grid, group_rows)
