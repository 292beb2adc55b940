"""Registered memory that rows are kept in from the tower to their eviction, so that NIXL can send
them from where they are. What finds no place in it is kept all the same, and travels over gRPC."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left

import torch

from chiasm.transport.base import DRAM, VRAM, Region

_ALIGNMENT = 256


class TensorRows:
    """Rows of one segment in memory of their own. See `RowBuffer`.

    Args:
        rows: [rows, width], contiguous.
        region: Where they lie, if in registered memory.
    """

    def __init__(self, rows: torch.Tensor, region: Region | None = None) -> None:
        assert rows.is_contiguous()
        self.region = region
        self.tensor = rows.view(torch.uint8)
        """uint8 [rows, row bytes]."""

    @property
    def num_rows(self) -> int:
        """Rows held."""
        return self.tensor.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes held, on whichever device."""
        return self.tensor.numel()

    def read(self, begin: int, end: int) -> memoryview:
        """Host bytes of rows [begin, end). From a GPU they come through pinned memory, on a stream
        of their own, so that a forward in progress is not waited for."""
        rows = self.tensor[begin:end].flatten()
        if rows.is_cuda:
            rows = _to_host(rows)
        return rows.numpy().data


class RowArena:
    """`nbytes` on one device, handed out piece by piece. Any thread.

    Args:
        nbytes: As many as the store may hold.
        device: Where the tower runs.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._space = FreeSpace(nbytes)
        kind = VRAM if device.type == "cuda" else DRAM
        index = self._memory.device.index or 0
        self.region = Region(self._memory.data_ptr(), nbytes, kind, index)

    @property
    def num_free(self) -> int:
        """Bytes that no rows lie in."""
        return self._space.num_free

    def keep(self, rows: torch.Tensor) -> TensorRows:
        """A copy of [rows, width]: here if there is a place, else in memory of its own."""
        nbytes = rows.numel() * rows.element_size()
        offset = self._space.take(nbytes)
        if offset is None:
            return TensorRows(rows.clone())
        place = self._memory[offset : offset + nbytes].view(rows.dtype).view(rows.shape)
        place.copy_(rows)
        where = Region(
            self.region.address + offset, nbytes, self.region.memory_type, self.region.device
        )
        kept = TensorRows(place, where)
        # The store drops its reference; a write under way holds one until it is over.
        weakref.finalize(kept, self._space.give_back, offset, nbytes)
        return kept


def keep_apart(rows: torch.Tensor) -> TensorRows:
    """A copy of [rows, width] that owns its memory, so that dropping it frees it."""
    return TensorRows(rows.clone())


class FreeSpace:
    """Which bytes of an arena are free: runs by offset, the first that fits is taken.

    Args:
        size: Bytes in all.
    """

    def __init__(self, size: int) -> None:
        self._size = size // _ALIGNMENT * _ALIGNMENT
        self._runs = [(0, self._size)] if self._size else []  # (offset, bytes), never adjacent
        self._lock = threading.Lock()

    @property
    def num_free(self) -> int:
        """Free bytes."""
        with self._lock:
            return sum(size for _, size in self._runs)

    def take(self, nbytes: int) -> int | None:
        """The offset of so many bytes; None when no run is long enough."""
        needed = _rounded(nbytes)
        with self._lock:
            for at, (offset, size) in enumerate(self._runs):
                if size >= needed:
                    rest = [(offset + needed, size - needed)] if size > needed else []
                    self._runs[at : at + 1] = rest
                    return offset
        return None

    def give_back(self, offset: int, nbytes: int) -> None:
        """Frees what `take` returned."""
        size = _rounded(nbytes)
        with self._lock:
            at = bisect_left(self._runs, (offset, 0))
            if at < len(self._runs) and self._runs[at][0] == offset + size:
                size += self._runs.pop(at)[1]
            if at and sum(self._runs[at - 1]) == offset:
                offset, before = self._runs.pop(at - 1)
                size, at = size + before, at - 1
            self._runs.insert(at, (offset, size))

    def check(self) -> None:
        """Raises AssertionError when runs overlap, touch, or leave the arena."""
        edge = -1
        for offset, size in self._runs:
            assert offset > edge and size > 0, "runs overlap or touch"
            edge = offset + size
        assert edge <= self._size, "a run leaves the arena"


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _to_host(rows: torch.Tensor) -> torch.Tensor:
    stream = torch.cuda.Stream(rows.device)
    host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
    with torch.cuda.stream(stream):
        host.copy_(rows, non_blocking=True)
    stream.synchronize()
    return host
