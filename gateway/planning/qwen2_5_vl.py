"""Qwen2.5-VL: native resolution, 14-pixel patches merged 2x2, two frames per temporal patch.

Sizes follow `smart_resize` of the reference processor; frame choice follows the family's published
video settings, except that short clips keep all their frames (see `choose_frames`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chiasm.errors import InvalidRequest
from chiasm.plan import Grid
from gateway.media.header import MediaHeader
from gateway.messages import MediaOptions
from gateway.planning.base import Layout, Planner

MAX_ASPECT_RATIO = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings:
    """preprocessor_config.json; defaults are the reference processor's."""

    patch_size: int = 14
    merge_size: int = 2
    temporal_patch_size: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280

    @property
    def factor(self) -> int:
        """Pixels that both sides are multiples of."""
        return self.patch_size * self.merge_size


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

    family = "qwen2_5_vl"

    def __init__(self, *, image: ImageSettings, video: VideoSettings) -> None:
        self._image = image
        self._video = video

    @classmethod
    def from_files(cls, *, image: Mapping[str, Any], video: Mapping[str, Any]) -> Qwen25VLPlanner:
        """From the JSON of the two processor files; either may be empty."""
        return cls(
            image=ImageSettings(**_sizes(image)),
            video=VideoSettings(
                **_sizes(video, fallback=image),
                **{k: video[k] for k in _VIDEO_KEYS if video.get(k) is not None},
            ),
        )

    def plan_image(self, header: MediaHeader, options: MediaOptions, *, param: str) -> Layout:
        """One picture: one grid of one temporal patch."""
        settings = self._image
        low, high = _pixel_range(settings, options, param)
        height, width = resized(header, settings.factor, low, high, param=param)
        grid = Grid(1, height // settings.patch_size, width // settings.patch_size)
        return Layout(
            self.family, header, height, width, (grid,), grid.patches // settings.merge_size**2
        )

    def plan_video(self, header: MediaHeader, options: MediaOptions, *, param: str) -> Layout:
        """One clip: one grid; every `temporal_patch_size` frames are one temporal patch."""
        settings = self._video
        frames = choose_frames(header, settings, options)
        low, high = _pixel_range(settings, options, param)
        if settings.cap_pixels_per_frame:
            high = _cap(settings, low, high, len(frames))
        height, width = resized(header, settings.factor, low, high, param=param)
        grid = Grid(
            len(frames) // settings.temporal_patch_size,
            height // settings.patch_size,
            width // settings.patch_size,
        )
        return Layout(
            self.family,
            header,
            height,
            width,
            (grid,),
            grid.patches // settings.merge_size**2,
            frame_indices=frames,
            seconds_per_grid=_seconds_per_grid(header, frames, settings),
        )


def smart_resize(
    height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Height and width as multiples of `factor`, within the pixel budget, ratio nearly kept.

    Follows the reference processor, Python's rounding to even included.
    """
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    if new_height * new_width > max_pixels:
        beta = math.sqrt((height * width) / max_pixels)
        new_height = max(factor, math.floor(height / beta / factor) * factor)
        new_width = max(factor, math.floor(width / beta / factor) * factor)
    elif new_height * new_width < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * beta / factor) * factor
        new_width = math.ceil(width * beta / factor) * factor
    return new_height, new_width


def resized(
    header: MediaHeader, factor: int, min_pixels: int, max_pixels: int, *, param: str
) -> tuple[int, int]:
    """`smart_resize` of a header; raises InvalidRequest for sides beyond 200:1."""
    short, long = sorted((header.height, header.width))
    if long > MAX_ASPECT_RATIO * short:
        raise InvalidRequest(
            f"{header.width}x{header.height} is longer than {MAX_ASPECT_RATIO}:1", param=param
        )
    return smart_resize(
        header.height, header.width, factor=factor, min_pixels=min_pixels, max_pixels=max_pixels
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


def _pixel_range(settings: ImageSettings, options: MediaOptions, param: str) -> tuple[int, int]:
    """The request's wish, inside the checkpoint's own limits on the upper side."""
    high = settings.max_pixels if options.max_pixels is None else options.max_pixels
    high = min(high, settings.max_pixels)
    low = min(settings.min_pixels, high) if options.min_pixels is None else options.min_pixels
    if high < settings.factor**2 or not 0 < low <= high:
        raise InvalidRequest(
            f"min_pixels {low} and max_pixels {high} leave no size: at least "
            f"{settings.factor**2}, and no more than the checkpoint's {settings.max_pixels}",
            param=param,
        )
    return low, high


_SIZE_KEYS = ("patch_size", "merge_size", "temporal_patch_size")
_VIDEO_KEYS = ("fps", "min_frames", "max_frames", "cap_pixels_per_frame", "max_video_tokens")


def _sizes(file: Mapping[str, Any], fallback: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Patch geometry and the pixel range, in either of the two spellings files use."""
    found = {
        key: value
        for key in _SIZE_KEYS
        if (value := file.get(key, (fallback or {}).get(key))) is not None
    }
    size = file.get("size") or {}
    spellings = {
        "min_pixels": (file.get("min_pixels"), size.get("shortest_edge"), size.get("min_pixels")),
        "max_pixels": (file.get("max_pixels"), size.get("longest_edge"), size.get("max_pixels")),
    }
    for key, values in spellings.items():
        value = next((v for v in values if v is not None), None)
        if value is not None:
            found[key] = value
    return {key: int(value) for key, value in found.items()}
