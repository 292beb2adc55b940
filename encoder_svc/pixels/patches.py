"""RGB frames to flattened patches, bit-equal to the PIL reference.

Shape letters: T frames of a temporal patch, H W grid, m merge cells, p patch pixels, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from encoder_svc.pixels.settings import PixelSettings

Bytes: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.float32]

_LEVELS = 256


class Patchifier:
    """Resizes, normalises and cuts frames of one modality. Stateless after construction.

    A resized pixel is one of 256 values, so rescale and normalise are one look into a table.
    """

    def __init__(self, settings: PixelSettings) -> None:
        self._settings = settings
        self._table_CL: Floats = level_table(settings)

    def resize(self, frame: Image.Image, *, height: int, width: int) -> Bytes:
        """An RGB picture of any size to uint8 [height, width, 3]."""
        return resize(frame, self._settings, height, width)

    def patchify(self, frames: Sequence[Bytes]) -> Floats:
        """Frames [height, width, 3] of one or more temporal groups to patches.

        A single frame fills its whole temporal patch; otherwise the number of frames is a multiple
        of it. Returns float32 [groups * H * W, C * T * p * p], rows in merge-window order.
        """
        geometry = self._settings.geometry
        T, p, m = geometry.temporal_patch, geometry.patch, geometry.merge
        stack = np.stack(frames) if len(frames) > 1 else frames[0][np.newaxis]
        count, height, width, channels = stack.shape
        assert count == 1 or count % T == 0
        # Looked up before they are put in order: a lookup is fastest along a row.
        planes = np.empty((channels, count, height, width), dtype=np.float32)
        for channel in range(channels):
            np.take(self._table_CL[channel], stack[..., channel], out=planes[channel], mode="clip")
        H, W, groups = height // p, width // p, max(1, count // T)
        cells = planes.reshape(channels, groups, -1, H // m, m, p, W // m, m, p)
        # C, groups, T or 1, H/m, m, p, W/m, m, p -> groups, H/m, W/m, m, m, C, T or 1, p, p
        order = cells.transpose(1, 3, 6, 4, 7, 0, 2, 5, 8)
        patches = np.empty((*order.shape[:6], T, p, p), dtype=np.float32)
        patches[...] = order
        return patches.reshape(groups * H * W, geometry.patch_values)


def level_table(settings: PixelSettings) -> Floats:
    """What each of 256 levels becomes in each channel, float32 [C, 256].

    Filled with the reference's own arithmetic: a float64 product, rounded, then float32.
    """
    levels = np.arange(_LEVELS, dtype=np.uint8).astype(np.float64) * settings.rescale_factor
    mean = np.array(settings.mean, dtype=np.float32)
    std = np.array(settings.std, dtype=np.float32)
    table: Floats = (levels.astype(np.float32)[:, None] - mean) / std
    return np.ascontiguousarray(table.T)


def resize(frame: Image.Image, settings: PixelSettings, height: int, width: int) -> Bytes:
    """An RGB picture to uint8 [height, width, 3], by Pillow."""
    assert frame.mode == "RGB"
    return np.asarray(frame.resize((width, height), resample=settings.resample))
