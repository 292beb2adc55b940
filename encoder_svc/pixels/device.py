"""Frames to patches on the tower's device, equal to the bit to `encoder_svc.pixels.patches`.

A pool thread decodes, copies the bytes as they are through pinned memory and starts the rest on a
stream of its own: resize, normalise and cut run beside the forward of the batch before.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from encoder_svc.pixels.patches import Bytes, level_table, resize
from encoder_svc.pixels.settings import PixelSettings
from encoder_svc.pixels.taps import PRECISION, bicubic_taps, rows_first

_LARGER = 4  # times the planned pixels; a larger frame is resized by Pillow, and takes less memory
_KEPT_TAPS = 256


@dataclass(frozen=True, slots=True)
class PlannedFrame:
    """uint8 [height, width, 3] of any size, and the size it is to have."""

    pixels: Bytes
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class PatchesOnDevice:
    """See `encoder_svc.work.DevicePatches`."""

    patches: Tensor
    made: torch.cuda.Event | None

    def ready(self) -> Tensor:
        """The patches, for use on the current stream."""
        if self.made is not None:
            torch.cuda.current_stream(self.patches.device).wait_event(self.made)
        return self.patches


class DevicePatchifier:
    """What `Patchifier` is, on a device. Any thread may call it.

    Args:
        settings: Of one modality.
        device: The tower's.
        dtype: The tower's: patches are rounded to it, as the tower would.
    """

    def __init__(
        self, settings: PixelSettings, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._settings = settings
        self._device = device
        self._table = torch.from_numpy(level_table(settings)).to(device, dtype).flatten()
        self._offsets = (torch.arange(3, dtype=torch.int32) * 256).to(device)
        self._taps: OrderedDict[tuple[int, int], tuple[Tensor, Tensor]] = OrderedDict()
        self._lock = threading.Lock()
        self._streams = threading.local()

    def resize(self, frame: Image.Image, *, height: int, width: int) -> PlannedFrame:
        """An RGB picture, to be resized later, or now where it is far larger than planned."""
        assert frame.mode == "RGB"
        bicubic = self._settings.resample is Image.Resampling.BICUBIC
        if not bicubic or frame.width * frame.height > _LARGER * width * height:
            return PlannedFrame(resize(frame, self._settings, height, width), height, width)
        return PlannedFrame(np.asarray(frame), height, width)

    def patchify(self, frames: Sequence[PlannedFrame]) -> PatchesOnDevice:
        """Frames of one or more temporal groups, as `Patchifier.patchify` takes them.

        Returns [groups * H * W, C * T * p * p] of the tower's dtype, made in stream order.
        """
        stream = self._stream()
        with torch.inference_mode(), nullcontext() if stream is None else torch.cuda.stream(stream):
            patches = self._cut(self._values(self._resized(frames)))
            made = None
            if stream is not None:
                made = torch.cuda.Event()
                made.record(stream)
        return PatchesOnDevice(patches, made)

    def _stream(self) -> torch.cuda.Stream | None:
        if self._device.type != "cuda":
            return None
        if not hasattr(self._streams, "own"):
            self._streams.own = torch.cuda.Stream(self._device)
        own: torch.cuda.Stream = self._streams.own
        return own

    def _resized(self, frames: Sequence[PlannedFrame]) -> Tensor:
        """uint8 [frames, height, width, 3]. Frames of a clip are of one size, but for rare ones."""
        if any(frame.pixels.shape != frames[0].pixels.shape for frame in frames):
            return torch.cat([self._resized([frame]) for frame in frames])
        pixels = self._uploaded([frame.pixels for frame in frames])
        height, width = frames[0].height, frames[0].width
        passes = [(2, width), (1, height)]
        if rows_first(pixels.shape[1], pixels.shape[2], height, width):
            passes.reverse()
        for axis, size in passes:
            if pixels.shape[axis] != size:
                pixels = self._resample(pixels, axis, size)
        return pixels

    def _uploaded(self, frames: Sequence[Bytes]) -> Tensor:
        host = torch.empty(
            (len(frames), *frames[0].shape),
            dtype=torch.uint8,
            pin_memory=self._device.type == "cuda",
        )
        for place, frame in zip(host.numpy(), frames, strict=True):
            np.copyto(place, frame)
        return host.to(self._device, non_blocking=True)

    def _resample(self, pixels: Tensor, axis: int, size: int) -> Tensor:
        places, weights = self._taps_of(pixels.shape[axis], size)
        shape = [1] * pixels.dim()
        shape[axis] = size
        total: Tensor | int = 1 << (PRECISION - 1)  # a half, for rounding
        for place, weight in zip(places, weights, strict=True):
            total = pixels.index_select(axis, place) * weight.view(shape) + total
        assert isinstance(total, Tensor)
        return (total >> PRECISION).clamp_(0, 255).to(torch.uint8)

    def _taps_of(self, source: int, size: int) -> tuple[Tensor, Tensor]:
        with self._lock:
            found = self._taps.get((source, size))
            if found is None:
                taps = bicubic_taps(source, size)
                found = (
                    torch.from_numpy(taps.places).to(self._device),
                    torch.from_numpy(taps.weights).to(self._device),
                )
                if self._device.type == "cuda":
                    torch.cuda.current_stream(self._device).synchronize()  # other streams read them
                self._taps[source, size] = found
                if len(self._taps) > _KEPT_TAPS:
                    self._taps.popitem(last=False)
            return found

    def _values(self, pixels: Tensor) -> Tensor:
        """Normalised, of the tower's dtype."""
        index = (pixels + self._offsets).flatten()
        return self._table.index_select(0, index).view(pixels.shape)

    def _cut(self, frames: Tensor) -> Tensor:
        geometry = self._settings.geometry
        T, p, m = geometry.temporal_patch, geometry.patch, geometry.merge
        if len(frames) == 1:
            frames = frames.expand(T, -1, -1, -1)
        count, height, width, channels = frames.shape
        assert count % T == 0
        H, W = height // p, width // p
        cells = frames.reshape(count // T, T, H // m, m, p, W // m, m, p, channels)
        order = cells.permute(0, 2, 5, 3, 6, 8, 1, 4, 7)
        return order.reshape(count // T * H * W, geometry.patch_values)
