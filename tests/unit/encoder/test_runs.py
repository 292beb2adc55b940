"""Units and runs of a clip: gapless, even, and where the encoder cuts too."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chiasm.plan import Grid, MediaPlan, Span
from chiasm.runs import UNIT_PATCHES, frame_runs, unit_edges
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
    for name, end in (("frames", len(plan.frame_indices)), ("rows", plan.num_rows)):
        spans = [getattr(run, name) for run in runs]
        assert spans[0].begin == 0 and spans[-1].end == end
        assert all(a.end == b.begin for a, b in itertools.pairwise(spans))
        assert all(len(span) for span in spans)
    group_rows = grid.h * grid.w // 4
    assert all(run.rows.begin == run.frames.begin // 2 * group_rows for run in runs)
    edges = unit_edges(grid)
    places = [edges.index(run.frames.begin // 2) for run in runs] + [len(edges) - 1]
    sizes = [end - begin for begin, end in itertools.pairwise(places)]
    assert len(runs) == min(parts, len(edges) - 1) and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("parts", [1, 2, 9])
def test_a_picture_is_one_run(parts: int) -> None:
    assert frame_runs(image_plan(30, 40), parts) == ((Span(0, 0), Span(0, 4)),)


@given(st.integers(1, 400), st.integers(1, 50), st.integers(1, 50))
def test_units_are_few_and_even(groups: int, height: int, width: int) -> None:
    grid = Grid(groups, 2 * height, 2 * width)
    area = grid.h * grid.w
    edges = unit_edges(grid)
    sizes = [end - begin for begin, end in itertools.pairwise(edges)]
    assert (edges[0], edges[-1]) == (0, groups) and min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) == 1 or max(sizes) * area <= UNIT_PATCHES
    fewer = len(sizes) - 1
    assert fewer == 0 or -(-groups // fewer) * area > UNIT_PATCHES


def test_units_of_a_clip() -> None:
    assert unit_edges(Grid(32, 24, 26)) == (0, 5, 10, 16, 21, 26, 32)


@pytest.mark.parametrize("parts", [0, -1])
def test_no_runs_are_refused(parts: int) -> None:
    with pytest.raises(ValueError, match="at least 1 run"):
        frame_runs(image_plan(30, 40), parts)
