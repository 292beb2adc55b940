"""Units and runs of a clip: gapless, even, and where the encoder cuts too."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chiasm.plan import Grid, MediaPlan, Span
from chiasm.runs import UNIT_PATCHES, frame_runs, unit_groups
from tests.unit.encoder.plans import image_plan, video_plan

PLANS = st.builds(
    lambda frames, height, width: video_plan(48, 64, tuple(range(frames)), cells=(height, width)),
    st.integers(1, 300),
    st.integers(1, 30),
    st.integers(1, 30),
)


@given(PLANS, st.integers(1, 40))
def test_runs_are_gapless_even_and_whole_units(plan: MediaPlan, parts: int) -> None:
    runs = frame_runs(plan, parts)
    grid = plan.grids[0]
    step = unit_groups(grid)
    for name, end in (("frames", len(plan.frame_indices)), ("rows", plan.num_rows)):
        spans = [getattr(run, name) for run in runs]
        assert spans[0].begin == 0 and spans[-1].end == end
        assert all(a.end == b.begin for a, b in itertools.pairwise(spans))
        assert all(len(span) for span in spans)
    group_rows = grid.h * grid.w // 4
    assert all(run.rows.begin == run.frames.begin // 2 * group_rows for run in runs)
    units = -(-grid.t // step)
    assert len(runs) == min(parts, units)
    sizes = [-(-len(run.rows) // (step * group_rows)) for run in runs]
    assert all(run.frames.begin % (2 * step) == 0 for run in runs)
    assert sum(sizes) == units and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("parts", [1, 2, 9])
def test_a_picture_is_one_run(parts: int) -> None:
    assert frame_runs(image_plan(30, 40), parts) == ((Span(0, 0), Span(0, 4)),)


def test_a_unit_is_as_large_as_may_be() -> None:
    for grid in (Grid(9, 2, 2), Grid(9, 16, 18), Grid(9, 64, 64), Grid(9, 100, 100)):
        groups = unit_groups(grid)
        area = grid.h * grid.w
        assert groups == 1 or groups * area <= UNIT_PATCHES < (groups + 1) * area
    assert unit_groups(Grid(9, 16, 16)) == 16


@pytest.mark.parametrize("parts", [0, -1])
def test_no_runs_are_refused(parts: int) -> None:
    with pytest.raises(ValueError, match="at least 1 run"):
        frame_runs(image_plan(30, 40), parts)
