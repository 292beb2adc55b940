"""Any Pillow mode to three-channel RGB.

The rules: transparency lies on white; 16-bit grey is scaled, never clamped; four-ink JPEGs follow
Adobe's inverted convention with or without the marker, as browsers do; colour profiles are ignored.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from PIL import Image

_MAX_8 = 255
_MAX_16 = 65535
_MAX_31 = 2**31 - 1
_WHITE = (255, 255, 255, 255)


def to_rgb(image: Image.Image) -> Image.Image:
    """The picture in mode RGB. Raises ValueError for a mode Pillow cannot convert."""
    if image.mode.startswith("I") or image.mode == "F":
        image = _wide_gray(image)
    if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, _WHITE), rgba).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _wide_gray(image: Image.Image) -> Image.Image:
    """16-bit, 32-bit and float grey to L, or to LA where one level means transparent."""
    values = np.asarray(image).astype(np.float64)
    gray = np.rint(np.nan_to_num(_scaled(values, image.mode)).clip(0, _MAX_8)).astype(np.uint8)
    level = Image.fromarray(gray)
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        alpha = np.where(values == clear, 0, _MAX_8).astype(np.uint8)
        return Image.merge("LA", (level, Image.fromarray(alpha)))
    return level


def _scaled(values: npt.NDArray[np.float64], mode: str) -> npt.NDArray[np.float64]:
    """To 0..255. Where a mode does not say its range, it is the smallest usual one that fits."""
    if mode.startswith("I;16"):
        return values * (_MAX_8 / _MAX_16)
    finite = values[np.isfinite(values)]
    peak = float(finite.max(initial=0.0))
    if mode == "F" and peak <= 1.0:
        return values * _MAX_8
    if mode == "F" and peak <= _MAX_8:
        return values
    return values * (_MAX_8 / (_MAX_16 if peak <= _MAX_16 else max(peak, float(_MAX_31))))
