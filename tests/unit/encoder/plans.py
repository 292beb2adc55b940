"""Plans and jobs made by hand, as a gateway would make them."""

from __future__ import annotations

import itertools

from chiasm.plan import Grid, MediaPlan, Modality, Span
from encoder_svc.messages import EncodeJob

_KEYS = itertools.count(1)


def image_plan(
    height: int, width: int, *, media_type: str = "image/png", cells: tuple[int, int] = (2, 2)
) -> MediaPlan:
    """A picture of height x width resized to cells of 28 pixels."""
    grid = Grid(1, 2 * cells[0], 2 * cells[1])
    return MediaPlan(
        digest=bytes(32),
        family="qwen2_5_vl",
        modality=Modality.IMAGE,
        source_height=height,
        source_width=width,
        resized_height=28 * cells[0],
        resized_width=28 * cells[1],
        grids=(grid,),
        num_rows=grid.patches // 4,
        media_bytes=0,
        media_type=media_type,
    )


def video_plan(
    height: int,
    width: int,
    indices: tuple[int, ...],
    *,
    media_type: str = "video/mp4",
    cells: tuple[int, int] = (1, 1),
) -> MediaPlan:
    """A clip of which `indices` are encoded, two frames to a temporal group."""
    grid = Grid(-(-len(indices) // 2), 2 * cells[0], 2 * cells[1])
    return MediaPlan(
        digest=bytes(32),
        family="qwen2_5_vl",
        modality=Modality.VIDEO,
        source_height=height,
        source_width=width,
        resized_height=28 * cells[0],
        resized_width=28 * cells[1],
        grids=(grid,),
        num_rows=grid.patches // 4,
        media_bytes=0,
        media_type=media_type,
        frame_indices=indices,
        frame_timestamps_s=tuple(float(i) for i in indices),
        seconds_per_grid=1.0,
    )


def job(
    plan: MediaPlan, media: bytes, *, frames: Span | None = None, priority: int = 0
) -> EncodeJob:
    """A job with a key of its own."""
    rows = Span(0, plan.num_rows)
    if frames is not None:
        group_rows = plan.num_rows // plan.grids[0].t
        rows = Span(frames.begin // 2 * group_rows, -(-frames.end // 2) * group_rows)
    return EncodeJob(
        key=next(_KEYS).to_bytes(8, "big"),
        plan=plan,
        frames=frames,
        rows=rows,
        media=media,
        priority=priority,
    )
