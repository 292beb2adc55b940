"""Qwen3-VL, dense and MoE: 16-pixel patches merged 2x2, two frames per temporal patch.

A picture has a pixel budget of its own, a clip one for all its frames. In the prompt every temporal
patch of a clip has its time in words before it and a run of placeholders of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.media.header import MediaHeader
from gateway.messages import MediaOptions
from gateway.placeholders import Run, Script
from gateway.planning.base import Layout, Planner
from gateway.planning.resize import (
    ImageSettings,
    clip_resized,
    pixel_range,
    read_sizes,
    resized,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoSettings(ImageSettings):
    """video_preprocessor_config.json; defaults are the reference processor's."""

    patch_size: int = 16
    min_pixels: int = 128 * 32 * 32
    max_pixels: int = 768 * 32 * 32
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    cap_pixels_per_frame: bool = False
    max_video_tokens: int = 768


class Qwen3VLPlanner(Planner):
    """Plans pictures as Qwen2.5-VL's reference does, clips with one budget."""

    family = "qwen3_vl"

    def __init__(self, *, image: ImageSettings, video: VideoSettings) -> None:
        self._image = image
        self._video = video

    @classmethod
    def from_files(
        cls,
        *,
        image: Mapping[str, Any],
        video: Mapping[str, Any],
        config: Mapping[str, Any] | None = None,
    ) -> Qwen3VLPlanner:
        """See the base class."""
        known = {key: video[key] for key in _VIDEO_KEYS if video.get(key) is not None}
        cells = read_sizes(video)
        for key in ("patch_size", "merge_size", "temporal_patch_size"):
            if key not in cells and image.get(key) is not None:
                cells[key] = int(image[key])
        return cls(
            image=ImageSettings(**{"patch_size": 16, **read_sizes(image)}),
            video=VideoSettings(**cells, **known),
        )

    def plan_image(self, header: MediaHeader, options: MediaOptions, *, param: str) -> Layout:
        """One picture: one grid of one temporal patch, one run of placeholders."""
        settings = self._image
        low, high = pixel_range(settings, options, param=param)
        height, width = resized(header, settings.factor, low, high, param=param)
        grid = settings.grid(height, width)
        return Layout(self.family, header, height, width, (grid,), settings.rows(grid))

    def plan_video(self, header: MediaHeader, options: MediaOptions, *, param: str) -> Layout:
        """One clip: one grid, a run of placeholders per temporal patch."""
        settings = self._video
        chosen = choose_frames(header, settings, options)
        count = max(len(chosen), settings.temporal_patch_size)
        low, high = pixel_range(settings, options, param=param)
        if settings.cap_pixels_per_frame:
            most = settings.max_video_tokens * settings.factor**2
            high = count * max(min(most, high // count), int(low * 1.05))
        height, width = clip_resized(header, settings, count, (low, high), param=param)
        frames = chosen + chosen[-1:] * (-len(chosen) % settings.temporal_patch_size)
        grid = settings.grid(height, width, num_frames=len(frames))
        rows = settings.rows(grid)
        times = group_times(header, frames, settings.temporal_patch_size)
        return Layout(
            self.family,
            header,
            height,
            width,
            (grid,),
            rows,
            frame_indices=frames,
            script=_script(times, rows // grid.t),
        )


def choose_frames(
    header: MediaHeader, settings: VideoSettings, options: MediaOptions
) -> tuple[int, ...]:
    """Frames spread evenly from the first to the last, both of them taken."""
    total = header.num_frames
    wanted = int(header.duration_s * (options.fps or settings.fps))
    most = min(options.max_frames or settings.max_frames, settings.max_frames)
    count = max(1, min(max(wanted, settings.min_frames), most, total))
    if count == 1:
        return (0,)
    step = (total - 1) / (count - 1)
    return (*(round(index * step) for index in range(count - 1)), total - 1)


def group_times(header: MediaHeader, frames: tuple[int, ...], patch: int) -> list[float]:
    """The middle of each temporal patch, in seconds."""
    times = [header.frame_times_s[index] for index in frames]
    return [(times[at] + times[at + patch - 1]) / 2 for at in range(0, len(times), patch)]


def _script(times: list[float], rows: int) -> Script:
    pieces: list[str | Run] = []
    for time in times:
        pieces += [f"<{time:.1f} seconds><|vision_start|>", Run(rows), "<|vision_end|>"]
    return tuple(pieces)


_VIDEO_KEYS = ("fps", "min_frames", "max_frames", "cap_pixels_per_frame", "max_video_tokens")
