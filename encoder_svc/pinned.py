"""Rows in pinned host memory: the second level of a worker whose tower is on a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from chiasm.transport.base import Region
from encoder_svc.arena import FreeSpace, TensorRows
from encoder_svc.messages import RowBuffer


class PinnedRows:
    """Rows on their way to host memory, or there. See `RowBuffer`.

    Args:
        rows: uint8 [rows, row bytes], pinned.
        there: Recorded behind the copy; None where there was nothing to wait for.
    """

    def __init__(self, rows: Tensor, there: torch.cuda.Event | None) -> None:
        self.tensor = rows
        self._there = there

    @property
    def num_rows(self) -> int:
        """Rows held."""
        return self.tensor.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.tensor.numel()

    @property
    def region(self) -> Region | None:
        """None: rows are sent from where finished rows lie."""
        return None

    def read(self, begin: int, end: int) -> memoryview:
        """Host bytes of rows [begin, end)."""
        if self._there is not None:
            self._there.synchronize()
        return self.tensor[begin:end].flatten().numpy().data


class PinnedLevel:
    """A `Keeper`. Its copies run on a stream of their own; the tower's next forward starts behind
    those that read the tower's memory, a millisecond for the rows of several large pictures.

    Args:
        nbytes: Pinned at once, here.
        device: Where the tower runs.
        keep: Copies rows on the device to where finished rows lie.
    """

    def __init__(
        self, nbytes: int, device: torch.device, keep: Callable[[Tensor], TensorRows]
    ) -> None:
        on_gpu = device.type == "cuda"
        self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=on_gpu)
        self._space = FreeSpace(nbytes)
        self._device = device
        self._keep = keep
        self._stream = torch.cuda.Stream(device) if on_gpu else None

    def spill(self, buffer: RowBuffer) -> PinnedRows | None:
        """See `Keeper`."""
        assert isinstance(buffer, TensorRows)
        offset = self._space.take(buffer.nbytes)
        if offset is None:
            return None
        place = self._memory[offset : offset + buffer.nbytes].view(buffer.num_rows, -1)
        there = None
        if self._stream is None:
            place.copy_(buffer.tensor)
        else:
            with torch.cuda.stream(self._stream):
                place.copy_(buffer.tensor, non_blocking=True)
                there = self._stream.record_event()
            # What the rows leave behind is written next by the tower: not before they have left.
            torch.cuda.default_stream(self._device).wait_event(there)
        kept = PinnedRows(place, there)
        weakref.finalize(kept, self._space.give_back, offset, buffer.nbytes)
        return kept

    def restore(self, buffer: RowBuffer) -> TensorRows:
        """See `Keeper`. Waits for the copy, a third of a millisecond for a picture of 1080p."""
        assert isinstance(buffer, PinnedRows)
        if self._stream is None:
            return self._keep(buffer.tensor)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            kept = self._keep(buffer.tensor.to(self._device, non_blocking=True))
        self._stream.synchronize()
        return kept
