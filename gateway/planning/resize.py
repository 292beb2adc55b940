"""Native resolution: the size a picture or clip gets so that whole cells fill its pixel budget.

Follows `smart_resize` of the reference processors, Python's rounding to even included. Pictures of
the Qwen families have a budget each; frames of newer families share one budget per clip.
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

    def grid(self, height: int, width: int, *, num_frames: int = 0) -> Grid:
        """Patches of pixels that are whole cells; of a picture, without `num_frames`, one group."""
        groups = num_frames // self.temporal_patch_size if num_frames else 1
        return Grid(groups, height // self.patch_size, width // self.patch_size)

    def rows(self, grid: Grid) -> int:
        """Rows that the grid's patches are merged into."""
        return grid.patches // self.merge_size**2


def smart_resize(
    height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Height and width as multiples of `factor`, within the pixel budget, ratio nearly kept."""
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
    _check_ratio(header, header.height, header.width, param)
    return smart_resize(
        header.height, header.width, factor=factor, min_pixels=min_pixels, max_pixels=max_pixels
    )


def clip_resized(
    header: MediaHeader,
    settings: ImageSettings,
    num_frames: int,
    budget: tuple[int, int],
    *,
    param: str,
) -> tuple[int, int]:
    """The size of every frame where one budget holds for the pixels of all frames together.

    Args:
        header: The clip, or a picture that counts as one temporal patch of frames.
        settings: Cell sizes.
        num_frames: Frames, before the last temporal patch is filled up.
        budget: Least and most pixels, frames x height x width.
        param: The request part to blame.

    Raises:
        InvalidRequest: Sides beyond 200:1.
    """
    factor, patch = settings.factor, settings.temporal_patch_size
    height, width = header.height, header.width
    if min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    _check_ratio(header, height, width, param)
    low, high = budget
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    volume = round(num_frames / patch) * patch * new_height * new_width
    if volume > high:
        beta = math.sqrt((num_frames * height * width) / high)
        new_height = max(factor, math.floor(height / beta / factor) * factor)
        new_width = max(factor, math.floor(width / beta / factor) * factor)
    elif volume < low:
        beta = math.sqrt(low / (num_frames * height * width))
        new_height = math.ceil(height * beta / factor) * factor
        new_width = math.ceil(width * beta / factor) * factor
    return new_height, new_width


def pixel_range(settings: ImageSettings, options: MediaOptions, *, param: str) -> tuple[int, int]:
    """The request's wish, inside the checkpoint's own limits on the upper side.

    Raises:
        InvalidRequest: The wishes leave no size.
    """
    least = settings.factor**2
    high = settings.max_pixels if options.max_pixels is None else options.max_pixels
    high = min(high, settings.max_pixels)
    low = min(settings.min_pixels, high) if options.min_pixels is None else options.min_pixels
    if high < least or not 0 < low <= high:
        raise InvalidRequest(
            f"min_pixels {low} and max_pixels {high} leave no size: at least "
            f"{least}, and no more than the checkpoint's {settings.max_pixels}",
            param=param,
        )
    return low, high


def read_sizes(
    file: Mapping[str, Any], fallback: Mapping[str, Any] | None = None
) -> dict[str, Any]:
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


_SIZE_KEYS = ("patch_size", "merge_size", "temporal_patch_size")


def _check_ratio(header: MediaHeader, height: int, width: int, param: str) -> None:
    short, long = sorted((height, width))
    if long > MAX_ASPECT_RATIO * short:
        raise InvalidRequest(
            f"{header.width}x{header.height} is longer than {MAX_ASPECT_RATIO}:1", param=param
        )
