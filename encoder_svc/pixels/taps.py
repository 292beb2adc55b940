"""Pillow's bicubic resize as tables: which pixels each new pixel is made of, and by what weights.

Pillow resizes in integers: weights are fixed-point numbers, each of the two passes rounds to bytes.
With the same tables, and the passes in the same order, any device computes the same bytes.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

PRECISION = 22
"""Bits behind the point of a weight."""

_SUPPORT = 2.0  # of the cubic, in pixels of the smaller of both sizes
_SHARPNESS = -0.5  # a of Keys 1981


class Taps(NamedTuple):
    """K source places and weights of each of `size` new pixels; unused ones weigh nothing."""

    places: npt.NDArray[np.int64]  # [K, size]
    weights: npt.NDArray[np.int32]  # [K, size]


def bicubic_taps(source: int, size: int) -> Taps:
    """The tables of one axis that goes from `source` pixels to `size`."""
    scale = source / size
    stretch = max(scale, 1.0)
    support = _SUPPORT * stretch
    centers = (np.arange(size) + 0.5) * scale
    first = np.maximum((centers - support + 0.5).astype(np.int64), 0)
    last = np.minimum((centers + support + 0.5).astype(np.int64), source)
    offsets = np.arange(int((last - first).max()))[:, None]
    used = offsets < last - first
    weights = np.where(used, _cubic((offsets + first - centers + 0.5) * (1.0 / stretch)), 0.0)
    total = np.zeros(size)
    for row in weights:  # in order, as the original adds them up
        total += row
    weights = weights / total * (1 << PRECISION)
    rounded = np.trunc(weights + np.where(weights < 0, -0.5, 0.5)).astype(np.int32)
    return Taps(np.minimum(first + offsets, source - 1), np.where(used, rounded, 0))


def _cubic(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    x = np.abs(x)
    a = _SHARPNESS
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    values: npt.NDArray[np.float64] = np.where(x < 1.0, near, np.where(x < _SUPPORT, far, 0.0))
    return values


def rows_first(height: int, width: int, new_height: int, new_width: int) -> bool:
    """Whether Pillow resizes rows before columns, which rounds otherwise.

    Pillow 13 does when rows shrink, and by more than twice what columns shrink by (found by trying;
    it is written down nowhere). Others never do.
    """
    fewer_rows, fewer_columns = height - new_height, width - new_width
    return fewer_rows > max(0, 2 * fewer_columns) and _rows_may_be_first()


@cache
def _rows_may_be_first() -> bool:
    """Asks Pillow: a picture that the two orders make different bytes of."""
    noise = np.random.default_rng(0).choice([0, 255], (16, 16)).astype(np.uint8)
    asked = np.asarray(Image.fromarray(noise).resize((15, 8), Image.Resampling.BICUBIC))
    rows = Image.fromarray(noise).resize((16, 8), Image.Resampling.BICUBIC)
    return np.array_equal(asked, np.asarray(rows.resize((15, 8), Image.Resampling.BICUBIC)))
