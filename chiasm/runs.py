"""How a clip is cut: into units, which are encoded alone, and into runs of units, one a worker.

The units follow from the plan and from nothing else: `UNIT_PATCHES` is a constant, not a setting.
Whoever encodes a unit, and whatever else that worker does meanwhile, runs the same shapes: a clip
encoded in any number of runs has the same rows to the bit.
"""

from __future__ import annotations

from typing import NamedTuple

from chiasm.plan import Grid, MediaPlan, Modality, Span

UNIT_PATCHES = 4096
"""Most patches of a unit, unless one temporal group alone has more: a group is never cut.

Enough to keep a large tower busy, little enough to spread a clip evenly and to ship rows early
(docs/adr/0007-units-of-a-clip.md).
"""


class FrameRun(NamedTuple):
    """One worker's share of a clip: `plan.frame_indices[begin:end]` and the rows they yield."""

    frames: Span
    rows: Span


def unit_edges(grid: Grid) -> tuple[int, ...]:
    """Where a clip's units begin, in temporal groups, and its end.

    As few units as `UNIT_PATCHES` allows, as even as whole groups allow.
    """
    most = max(1, UNIT_PATCHES // (grid.h * grid.w))
    units = -(-grid.t // most)
    return tuple(grid.t * index // units for index in range(units + 1))


def frame_runs(plan: MediaPlan, num_runs: int) -> tuple[FrameRun, ...]:
    """Cuts a clip into at most `num_runs` runs of whole units, as even as units allow.

    The runs follow each other without gap; their lengths differ by at most one unit.
    A picture is one run, without frames; an item of one run may be asked for without naming it.

    Raises:
        ValueError: `num_runs` is not positive.
    """
    if num_runs < 1:
        raise ValueError(f"a clip is cut into at least 1 run, not {num_runs}")
    whole = FrameRun(Span(0, len(plan.frame_indices)), Span(0, plan.num_rows))
    if plan.modality is not Modality.VIDEO or len(plan.grids) != 1:
        return (whole,)
    grid = plan.grids[0]
    units = unit_edges(grid)
    runs = min(num_runs, len(units) - 1)
    edges = [units[(len(units) - 1) * index // runs] for index in range(runs + 1)]
    frames = len(plan.frame_indices)
    group_frames, group_rows = -(-frames // grid.t), plan.num_rows // grid.t
    return tuple(
        FrameRun(
            Span(begin * group_frames, min(end * group_frames, frames)),
            Span(begin * group_rows, end * group_rows),
        )
        for begin, end in zip(edges, edges[1:], strict=False)
    )
