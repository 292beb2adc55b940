"""GLM-4.1V, GLM-4.5V and GLM-4.6V: 14-pixel patches merged 2x2, two frames per temporal patch.

A picture is planned as a clip of one temporal patch. In the prompt every temporal patch of a clip
is a run of *image* placeholders with its time in words behind it. GLM-4.6V chooses frames by other
rules, and writes times otherwise, than the models before it; which of them a checkpoint follows,
its processor files say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from gateway.media.header import MediaHeader
from gateway.messages import MediaOptions
from gateway.placeholders import Run, Script
from gateway.planning.base import Layout, Planner
from gateway.planning.resize import ImageSettings, clip_resized, pixel_range, read_sizes

_RATES = ((30.0, 3.0), (300.0, 1.0), (math.inf, 0.5))
"""GLM-4.6V: clips up to so many seconds are read at so many temporal patches a second."""
_LONGEST_S = 2400.0
_MOST_FRAMES = 640


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureSettings(ImageSettings):
    """preprocessor_config.json; defaults are the reference processor's. Two frames a picture."""

    min_pixels: int = 112 * 112
    max_pixels: int = 28 * 28 * 15000


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipSettings(ImageSettings):
    """video_preprocessor_config.json; defaults are the reference processor's."""

    min_pixels: int = 112 * 112
    max_pixels: int = 28 * 28 * 2 * 30000
    fps: float = 2.0
    max_duration: float = 300.0
    dense: bool = False
    """GLM-4.6V's frame choice and times."""


class Glm4vPlanner(Planner):
    """Plans as the family's reference processors do."""

    family = "glm4v"

    def __init__(self, *, image: PictureSettings, video: ClipSettings) -> None:
        self._image = image
        self._video = video

    @classmethod
    def from_files(
        cls,
        *,
        image: Mapping[str, Any],
        video: Mapping[str, Any],
        config: Mapping[str, Any] | None = None,
    ) -> Glm4vPlanner:
        """See the base class."""
        known = {key: video[key] for key in ("fps", "max_duration") if video.get(key) is not None}
        return cls(
            image=PictureSettings(**read_sizes(image)),
            video=ClipSettings(
                **read_sizes(video), **known, dense=_is_dense((image, video), config or {})
            ),
        )

    def plan_image(self, header: MediaHeader, options: MediaOptions, *, param: str) -> Layout:
        """One picture: one grid of one temporal patch, one run of placeholders."""
        settings = self._image
        budget = pixel_range(settings, options, param=param)
        frames = settings.temporal_patch_size
        height, width = clip_resized(header, settings, frames, budget, param=param)
        grid = settings.grid(height, width)
        return Layout(self.family, header, height, width, (grid,), settings.rows(grid))

    def plan_video(self, header: MediaHeader, options: MediaOptions, *, param: str) -> Layout:
        """One clip: one grid, a run of placeholders per temporal patch."""
        settings = self._video
        frames = choose_frames(header, settings, options)
        budget = pixel_range(settings, options, param=param)
        height, width = clip_resized(header, settings, len(frames), budget, param=param)
        grid = settings.grid(height, width, num_frames=len(frames))
        rows = settings.rows(grid)
        times = [header.frame_times_s[index] for index in frames[:: settings.temporal_patch_size]]
        return Layout(
            self.family,
            header,
            height,
            width,
            (grid,),
            rows,
            frame_indices=frames,
            script=_script(times, rows // grid.t, dense=settings.dense),
        )


def choose_frames(
    header: MediaHeader, settings: ClipSettings, options: MediaOptions
) -> tuple[int, ...]:
    """Frames in order, none twice, the last repeated until the last temporal patch is full."""
    choose = _dense_frames if settings.dense else _steady_frames
    chosen = list(dict.fromkeys(choose(header, settings, options)))
    if options.max_frames:
        kept = min(len(chosen), options.max_frames)
        chosen = [chosen[index * len(chosen) // kept] for index in range(kept)]
    missing = -len(chosen) % settings.temporal_patch_size
    return (*chosen, *chosen[-1:] * missing)


def _steady_frames(header: MediaHeader, settings: ClipSettings, options: MediaOptions) -> list[int]:
    """So many frames a second; of a long clip, as many as of the longest that is read so."""
    last, duration = header.num_frames - 1, header.duration_s
    native = _native_rate(header)
    rate = options.fps or settings.fps
    if duration <= settings.max_duration:
        count = max(math.floor(duration * rate), 1)
        return [min(last, math.ceil(index * native / rate)) for index in range(count)]
    count = int(settings.max_duration * rate)
    if count > last:
        return list(range(header.num_frames))
    step = duration / (count - 1)
    return [min(last, math.ceil(index * step * native)) for index in range(count)]


def _dense_frames(header: MediaHeader, settings: ClipSettings, options: MediaOptions) -> list[int]:
    """The first frame of each slice of time, slices the thinner the shorter the clip."""
    total, patch = header.num_frames, settings.temporal_patch_size
    read_s = min(header.duration_s, _LONGEST_S)
    rate = options.fps or next(rate for limit, rate in _RATES if read_s <= limit)
    count = min(int(read_s * rate * patch), _MOST_FRAMES)
    if total < count:
        return _spread(0, total - 1, count)
    chosen: list[int] = []
    next_s, interval_s = 0.0, 1 / _native_rate(header)
    for index in range(total):
        if index * interval_s >= next_s:
            next_s += 1 / (patch * rate)
            chosen.append(index)
            if next_s >= int(header.duration_s):
                break
    if len(chosen) < count:
        return _spread(chosen[0], chosen[-1], count)
    return _spread(0, total - 1, count) if len(chosen) > count else chosen


def _native_rate(header: MediaHeader) -> float:
    """Frames a second as a container would say it (30, 30000/1001): ties are decided by it."""
    if header.duration_s <= 0:
        return 1.0
    return float(Fraction(header.num_frames / header.duration_s).limit_denominator(2000))


def _spread(first: int, last: int, count: int) -> list[int]:
    """Evenly from first to last, cut down to whole frames."""
    if count < 2:
        return [first]
    step = (last - first) / (count - 1)
    return [*(int(first + index * step) for index in range(count - 1)), last]


def _script(times: list[float], rows: int, *, dense: bool) -> Script:
    pieces: list[str | Run] = []
    for time in times:
        told = f"{time:.1f} seconds" if dense else str(int(time))
        pieces += ["<|begin_of_image|>", Run(rows, "<|image|>"), f"<|end_of_image|>{told}"]
    return tuple(pieces)


def _is_dense(files: tuple[Mapping[str, Any], ...], config: Mapping[str, Any]) -> bool:
    """GLM-4.6V's processor. Its MoE has the model_type of GLM-4.5V: the files know better."""
    keys = ("processor_class", "video_processor_type", "image_processor_type")
    named = [str(file[key]) for file in files for key in keys if file.get(key)]
    if named:
        return any(name.startswith("Glm46V") for name in named)
    return config.get("model_type") == "glm46v"
