"""Qwen2.5-VL plans: edges by example, invariants by search, digests by what they must not mix."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chiasm.errors import InvalidRequest
from chiasm.plan import Modality
from gateway.media.header import MediaHeader
from gateway.messages import MediaOptions
from gateway.order import split
from gateway.planning import Keys, media_digest, planner_for
from gateway.planning.qwen2_5_vl import (
    Qwen25VLPlanner,
    VideoSettings,
    choose_frames,
)
from tests.unit.gateway_core.conftest import MODEL_DIR

PUBLISHED = Qwen25VLPlanner.from_files(image={}, video={})
NONE = MediaOptions()


def image(height: int, width: int) -> MediaHeader:
    return MediaHeader(Modality.IMAGE, "image/png", height, width)


def video(frames: int, fps: float, height: int = 480, width: int = 640) -> MediaHeader:
    times = tuple(i / fps for i in range(frames))
    return MediaHeader(Modality.VIDEO, "video/mp4", height, width, times, frames / fps)


def plan(header: MediaHeader, options: MediaOptions = NONE, planner=PUBLISHED):  # noqa: ANN001, ANN201
    return planner.plan(header, options, param="messages[0].content[2]")


@pytest.mark.parametrize(
    ("height", "width", "resized"),
    [
        (1, 1, (56, 56)),
        (26, 28, (56, 84)),
        (28, 28, (56, 56)),
        (500, 19, (504, 28)),
        (5, 1000, (28, 812)),
        (1080, 1920, (728, 1316)),
    ],
)
def test_sizes(height: int, width: int, resized: tuple[int, int]) -> None:
    layout = plan(image(height, width))
    assert (layout.resized_height, layout.resized_width) == resized
    assert layout.num_rows * 4 == layout.grids[0].patches


@pytest.mark.parametrize(("height", "width"), [(5, 1005), (5, 1093), (1093, 5), (1, 400)])
def test_beyond_200_to_1(height: int, width: int) -> None:
    with pytest.raises(InvalidRequest) as failure:
        plan(image(height, width))
    assert failure.value.param == "messages[0].content[2]"
    assert plan(image(5, 1000))


@pytest.mark.parametrize(
    ("frames", "kept"),
    [
        (1, (0, 0)),
        (2, (0, 1)),
        (3, (0, 1, 2, 2)),
        (4, (0, 1, 2, 3)),
        (5, (0, 1, 2, 3)),
    ],
)
def test_short_clips(frames: int, kept: tuple[int, ...]) -> None:
    assert plan(video(frames, fps=30)).frame_indices == kept


def test_frames_follow_time_not_count() -> None:
    for fps in (10, 25, 60):
        layout = plan(video(10 * fps, fps=fps))
        assert len(layout.frame_indices) == 20
        assert layout.seconds_per_grid == pytest.approx(1.0)
        assert layout.grids[0].t == 10
    assert len(plan(video(5, fps=1)).frame_indices) == 6  # five frames in five seconds: all
    assert plan(video(5, fps=1)).seconds_per_grid == pytest.approx(2.0)
    assert len(plan(video(3600 * 30, fps=30)).frame_indices) == 768
    assert len(plan(video(300, fps=30), MediaOptions(fps=1.0)).frame_indices) == 10
    assert len(plan(video(300, fps=30), MediaOptions(max_frames=6)).frame_indices) == 6


def test_a_clip_without_a_duration_has_a_spacing() -> None:
    still = MediaHeader(Modality.VIDEO, "video/mp4", 48, 64, (0.0,), 0.0)
    assert plan(still).seconds_per_grid == pytest.approx(1.0)


def test_long_clips_share_one_pixel_budget() -> None:
    short, long = plan(video(20, 10, 2160, 3840)), plan(video(3600 * 30, 30, 2160, 3840))
    assert short.resized_height * short.resized_width > long.resized_height * long.resized_width
    assert long.pixels <= 128_000 * 28 * 28 * 0.9 * 2


@given(
    st.integers(1, 5000),
    st.floats(0.5, 120),
    st.integers(1, 4),
    st.integers(1, 40),
    st.integers(1, 800),
)
def test_frame_choice(frames: int, fps: float, patch: int, low: int, high: int) -> None:
    settings = VideoSettings(temporal_patch_size=patch, min_frames=low, max_frames=max(low, high))
    kept = choose_frames(video(frames, fps), settings, NONE)
    assert len(kept) % patch == 0
    assert len(kept) >= patch
    assert list(kept) == sorted(kept)
    assert kept[0] == 0
    assert kept[-1] < frames
    repeats = len(kept) - len(set(kept))
    assert repeats < patch or frames < patch
    assert len(kept) < max(settings.max_frames, patch) + patch


@given(st.integers(1, 20_000), st.integers(1, 20_000))
def test_sizes_stay_in_the_budget(height: int, width: int) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    layout = plan(image(height, width))
    assert layout.resized_height % 28 == layout.resized_width % 28 == 0
    thinnest = 28 * max(layout.resized_height, layout.resized_width)
    assert 56 * 56 <= layout.pixels <= max(28 * 28 * 1280, thinnest)


@given(st.integers(1, 400), st.integers(1, 60))
def test_runs_are_gapless_and_routed_apart(frames: int, wanted: int) -> None:
    sealed = plan(video(frames, fps=2)).to_plan(media_bytes=10)
    runs = split(sealed, wanted)
    assert 1 <= len(runs) <= wanted
    assert sum(run.patches for run in runs) == sealed.patches
    assert len({run.key for run in runs}) == len(runs)
    assert [run.part for run in runs] == list(range(len(runs)))
    assert [run.rows.begin for run in runs] == [0, *(run.rows.end for run in runs[:-1])]
    assert runs[-1].rows.end == sealed.num_rows
    if len(runs) == 1:
        assert runs[0].frames is None
        assert runs[0].key == sealed.digest


def test_pictures_stay_whole() -> None:
    (run,) = split(plan(image(1000, 1000)).to_plan(media_bytes=1), 9)
    assert run.frames is None


def test_options() -> None:
    assert plan(image(1000, 1000), MediaOptions(max_pixels=100_000)).pixels <= 100_000
    assert plan(image(1000, 1000), MediaOptions(max_pixels=10**9)).pixels <= 28 * 28 * 1280
    assert plan(video(10, 10), MediaOptions(max_pixels=50_000)).grids[0].h == 14
    for options in (MediaOptions(max_pixels=100), MediaOptions(min_pixels=10**9)):
        with pytest.raises(InvalidRequest):
            plan(image(100, 100), options)


def test_the_demo_checkpoint_has_its_own_limits() -> None:
    planner = planner_for(MODEL_DIR)
    assert plan(image(1000, 1000), planner=planner).pixels <= 50176
    assert plan(video(10, 10, 1000, 1000), planner=planner).grids[0].h == 12


def test_unknown_families_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="qwen2_5_vl"):
        planner_for(tmp_path)


def test_digest_covers_all_that_matters() -> None:
    sealed = plan(image(30, 150)).to_plan(media_bytes=10)
    keys = Keys(tower=b"t", processor=b"p", salt=b"s")
    base = media_digest(b"m", sealed, keys)
    assert base == media_digest(b"m", dataclasses.replace(sealed, digest=b"ignored"), keys)
    others = [
        media_digest(b"n", sealed, keys),
        media_digest(b"m", plan(image(150, 30)).to_plan(media_bytes=10), keys),
        *(
            media_digest(b"m", sealed, dataclasses.replace(keys, **{name: b"x"}))
            for name in ("tower", "processor", "salt")
        ),
        media_digest(b"m", sealed, Keys(tower=b"tp", processor=b"", salt=b"s")),
        media_digest(b"m", sealed, Keys(tower=b"", processor=b"tp", salt=b"s")),
    ]
    assert len({base, *others}) == len(others) + 1
    assert len(base) == 32
