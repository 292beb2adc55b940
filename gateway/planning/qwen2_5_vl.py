"""Qwen2-VL and Qwen2.5-VL: native resolution, patches merged 2x2, two frames a temporal patch.

Sizes: see `resize`. Frame choice follows the family's published video settings, except that short
clips keep all their frames (see `choose_frames`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.media.header import MediaHeader
from gateway.messages import MediaOptions
from gateway.planning.base import Layout, Planner
from gateway.planning.resize import ImageSettings, pixel_range, read_sizes, resized


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoSettings(ImageSettings):
    """video_preprocessor_config.json; defaults are the family's published ones."""

    min_pixels: int = 128 * 28 * 28
    max_pixels: int = 768 * 28 * 28
    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768
    cap_pixels_per_frame: bool = True
    max_video_tokens: int = 128_000


class Qwen25VLPlanner(Planner):
    """Plans by integers alone: equal headers and options give equal layouts."""

    def __init__(
        self, *, image: ImageSettings, video: VideoSettings, counts_groups: bool = False
    ) -> None:
        self._image = image
        self._video = video
        self._counts_groups = counts_groups
        self.family = _FIRST if counts_groups else _LATER

    @classmethod
    def from_files(
        cls,
        *,
        image: Mapping[str, Any],
        video: Mapping[str, Any],
        config: Mapping[str, Any] | None = None,
    ) -> Qwen25VLPlanner:
        """See the base class."""
        return cls(
            image=ImageSettings(**read_sizes(image)),
            video=VideoSettings(
                **read_sizes(video, fallback=image),
                **{k: video[k] for k in _VIDEO_KEYS if video.get(k) is not None},
            ),
            counts_groups=(config or {}).get("model_type") == _FIRST,
        )

    def plan_image(self, header: MediaHeader, options: MediaOptions, *, param: str) -> Layout:
        """One picture: one grid of one temporal patch."""
        settings = self._image
        low, high = pixel_range(settings, options, param=param)
        height, width = resized(header, settings.factor, low, high, param=param)
        grid = settings.grid(height, width)
        return Layout(self.family, header, height, width, (grid,), settings.rows(grid))

    def plan_video(self, header: MediaHeader, options: MediaOptions, *, param: str) -> Layout:
        """One clip: one grid; every `temporal_patch_size` frames are one temporal patch."""
        settings = self._video
        frames = choose_frames(header, settings, options)
        low, high = pixel_range(settings, options, param=param)
        if settings.cap_pixels_per_frame:
            high = _cap(settings, low, high, len(frames))
        height, width = resized(header, settings.factor, low, high, param=param)
        grid = settings.grid(height, width, num_frames=len(frames))
        return Layout(
            self.family,
            header,
            height,
            width,
            (grid,),
            settings.rows(grid),
            frame_indices=frames,
            # Qwen2-VL's time counts temporal patches; later models' counts seconds.
            seconds_per_grid=(
                1.0 if self._counts_groups else _seconds_per_grid(header, frames, settings)
            ),
        )


def choose_frames(
    header: MediaHeader, settings: VideoSettings, options: MediaOptions
) -> tuple[int, ...]:
    """Indices of the frames to decode, evenly spread, a multiple of the temporal patch.

    A clip with no more frames than wanted keeps them all, and its last frame fills the last
    temporal patch (the reference's sampler drops frames there instead, and fails on one).
    """
    total, patch = header.num_frames, settings.temporal_patch_size
    rate = options.fps or settings.fps
    most = min(options.max_frames or settings.max_frames, settings.max_frames)
    wanted = min(max(header.duration_s * rate, settings.min_frames), most)
    if wanted >= total:
        missing = -total % patch
        return (*range(total), *(total - 1,) * missing)
    count = max(patch, math.floor(wanted / patch) * patch)
    return tuple(min(total - 1, i * total // count) for i in range(count))


def _seconds_per_grid(
    header: MediaHeader, frames: tuple[int, ...], settings: VideoSettings
) -> float:
    """Time between temporal patches: from the frames really chosen, repeats not counted."""
    spacing = header.duration_s / len(set(frames)) if header.duration_s > 0 else 1 / settings.fps
    return settings.temporal_patch_size * spacing


def _cap(settings: VideoSettings, low: int, high: int, num_frames: int) -> int:
    """Each frame's even share of the clip's budget (90 % of `max_video_tokens`), floored."""
    budget = int(settings.max_video_tokens * settings.factor**2 * 0.9)
    share = budget * settings.temporal_patch_size // num_frames
    return max(min(high, share), int(low * 1.05))


_FIRST, _LATER = "qwen2_vl", "qwen2_5_vl"
_VIDEO_KEYS = ("fps", "min_frames", "max_frames", "cap_pixels_per_frame", "max_video_tokens")
