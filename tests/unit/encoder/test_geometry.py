"""Plans to runs and units, and plans that are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chiasm.errors import InvalidRequest
from chiasm.plan import Grid, Span
from chiasm.runs import frame_runs
from encoder_svc.geometry import Geometry, resolve_run
from tests.unit.encoder.plans import image_plan, video_plan

GEOMETRY = Geometry(patch=14, temporal_patch=2, merge=2)
IMAGE = image_plan(100, 100, cells=(2, 3))
CLIP = video_plan(48, 64, tuple(range(9)), cells=(2, 3))  # 5 groups of 6 rows


def test_a_picture_is_one_group() -> None:
    run = resolve_run(GEOMETRY, IMAGE, None, Span(0, 6))
    assert (run.patches, run.rows) == (24, Span(0, 6))
    (unit,) = run.units()
    assert unit.grid == Grid(1, 4, 6) and unit.patches == 24


def test_runs_of_a_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chiasm.runs.UNIT_PATCHES", 2 * 24)
    assert resolve_run(GEOMETRY, CLIP, None, Span(0, 30)).patches == 5 * 24
    run = resolve_run(GEOMETRY, CLIP, Span(2, 9), Span(6, 30))
    assert (run.begin, run.end, run.patches) == (1, 5, 4 * 24)
    assert [(u.begin, u.end, u.grid.t) for u in run.units()] == [(1, 3, 2), (3, 5, 2)]
    monkeypatch.setattr("chiasm.runs.UNIT_PATCHES", 1)  # a group is never cut
    assert [u.grid.t for u in run.units()] == [1, 1, 1, 1]


@given(st.integers(1, 130), st.integers(1, 40), st.integers(1, 20))
def test_any_runs_have_the_units_of_the_whole(frames: int, side: int, parts: int) -> None:
    """Whoever encodes them: this is why rows are equal to the bit."""
    clip = video_plan(48, 64, tuple(range(frames)), cells=(side, side))
    whole = resolve_run(GEOMETRY, clip, None, Span(0, clip.num_rows)).units()
    cut = [
        unit
        for frames_of, rows in frame_runs(clip, parts)
        for unit in resolve_run(GEOMETRY, clip, frames_of, rows).units()
    ]
    assert tuple(cut) == whole


@pytest.mark.parametrize("temporal", [1, 2, 3, 4])
def test_groups_round_up(temporal: int) -> None:
    geometry = Geometry(patch=14, temporal_patch=temporal, merge=2)
    groups = -(-9 // temporal)
    plan = replace(CLIP, grids=(Grid(groups, 4, 6),), num_rows=groups * 6)
    assert resolve_run(geometry, plan, None, Span(0, groups * 6)).end == groups


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grids": ()}, "one grid"),
        ({"grids": (Grid(1, 4, 6), Grid(1, 4, 6))}, "one grid"),
        ({"resized_height": 57}, "does not make 57x84"),
        ({"grids": (Grid(1, 4, 5),), "resized_width": 70}, "impossible grid"),
        ({"grids": (Grid(0, 4, 6),)}, "impossible grid"),
        ({"grids": (Grid(1, 0, 0),), "resized_height": 0, "resized_width": 0}, "impossible grid"),
        ({"num_rows": 7}, "makes 6 rows, the plan says 7"),
        ({"grids": (Grid(2, 4, 6),), "num_rows": 12}, "1 frames do not make 2"),
        ({"source_height": 0}, "no source size"),
    ],
)
def test_plans_that_contradict_themselves(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        resolve_run(GEOMETRY, replace(IMAGE, **changes), None, Span(0, 6))


@pytest.mark.parametrize(
    ("frames", "rows"),
    [
        (Span(0, 4), Span(0, 12)),  # cuts a unit
        (Span(4, 9), Span(12, 30)),
        (Span(0, 3), Span(0, 12)),  # cuts a temporal patch
        (Span(1, 4), Span(0, 12)),
        (Span(4, 4), Span(12, 12)),
        (Span(8, 10), Span(24, 30)),  # beyond the end
        (Span(0, 2), Span(0, 7)),  # rows of another run
        (None, Span(0, 29)),
    ],
)
def test_runs_that_do_not_fit(
    frames: Span | None, rows: Span, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chiasm.runs.UNIT_PATCHES", 2 * 24)
    with pytest.raises(InvalidRequest):
        resolve_run(GEOMETRY, CLIP, frames, rows)


def test_a_clip_without_frames() -> None:
    with pytest.raises(InvalidRequest):
        resolve_run(GEOMETRY, replace(CLIP, frame_indices=()), None, Span(0, 30))
