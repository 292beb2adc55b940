"""Fills parameters from files as fast as the files can be read.

For a GPU, several threads read into pinned buffers, from where the device copies while the next
part is read; it also changes dtype and order. On a CPU a part is read when it is asked for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch

from chiasm.pinned_ring import PinnedRing
from chiasm.stored_tensor import Block

THREADS = 8
"""At most; more of them do not read faster."""
_BATCH_BYTES = 32 << 20  # of blocks that one thread copies in a row
_BUFFER_BYTES = 6 << 20  # small enough that the device finds it in the processor's cache
_LINES_BYTES = 16 << 20  # of lines that are put into order one call at a time
_BUFFERS = 2  # of a thread: one is read into while the device copies from the other

Batch = list[tuple[Block, torch.Tensor]]
Told = Callable[[int], None]
"""Is told of bytes that have arrived, by any thread, one at a time."""


class WeightCopier(Protocol):
    """Copies blocks of files into parameters."""

    def put(self, block: Block, target: torch.Tensor) -> None:
        """Copies a block, sooner or later.

        Args:
            block: A line for each index of the target's first dimension.
            target: Of any dtype and strides; may be a view.
        """

    def wait(self) -> None:
        """Returns once all targets are filled. Raises ValueError: a file was cut short."""

    def close(self) -> None:
        """Ends what `put` has begun; nothing is written afterwards."""


def copier_for(device: torch.device, told: Told) -> WeightCopier:
    """The copier to parameters on that device."""
    return DeviceCopier(device, told) if device.type == "cuda" else HostCopier(told)


def num_threads() -> int:
    """Threads that files are read by."""
    return max(1, min(THREADS, os.cpu_count() or 1))


class HostCopier:
    """See `WeightCopier`.

    Args:
        told: Of what has arrived.
    """

    def __init__(self, told: Told) -> None:
        self._told = told

    def put(self, block: Block, target: torch.Tensor) -> None:
        """See `WeightCopier`."""
        target.copy_(block.read().view(target.shape))
        self._told(target.nbytes)

    def wait(self) -> None:
        """See `WeightCopier`."""

    def close(self) -> None:
        """See `WeightCopier`."""


class DeviceCopier:
    """See `WeightCopier`.

    Blocks go to threads by the batch: small ones would cost more to hand over than to read, and
    the interpreter that all threads share is what limits.

    Args:
        device: A GPU.
        told: Of what has arrived.
    """

    def __init__(self, device: torch.device, told: Told) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._told = told
        self._lock = threading.Lock()
        self._lanes = threading.local()
        self._pool = ThreadPoolExecutor(num_threads(), thread_name_prefix="weights")
        self._pending: list[Future[None]] = []
        self._batch: Batch = []
        self._batch_bytes = 0

    def put(self, block: Block, target: torch.Tensor) -> None:
        """See `WeightCopier`."""
        step = max(1, _BATCH_BYTES // max(1, block.width))
        for first in range(0, block.lines, step):
            count = min(step, block.lines - first)
            self._batch.append((block.part(first, count), target[first : first + count]))
            self._batch_bytes += count * block.width
            if self._batch_bytes >= _BATCH_BYTES:
                self._hand_over()

    def wait(self) -> None:
        """See `WeightCopier`."""
        if self._batch:
            self._hand_over()
        for future in self._pending:
            future.result()
        self._pending.clear()
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """See `WeightCopier`."""
        self._pool.shutdown(cancel_futures=True)
        torch.cuda.synchronize(self._device)

    def _hand_over(self) -> None:
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        # The targets' memory may have been another's, whom the caller's stream still reads.
        is_free = torch.cuda.Event()
        is_free.record(torch.cuda.current_stream(self._device))
        self._pending.append(self._pool.submit(self._copy, batch, is_free))

    @torch.inference_mode()
    def _copy(self, batch: Batch, is_free: torch.cuda.Event) -> None:
        lane = getattr(self._lanes, "own", None)
        if lane is None:
            torch.cuda.set_device(self._device)
            lane = self._lanes.own = _Lane(self._device)
        lane.stream.wait_event(is_free)
        with torch.cuda.stream(lane.stream):
            for block, target in batch:
                lane.copy(block, target)
        with self._lock:
            self._told(sum(target.nbytes for _, target in batch))


class _Lane:
    """What one thread copies through; its stream is the current one."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._device = device
        buffers = [_pinned(_BUFFER_BYTES) for _ in range(_BUFFERS)]
        self._ring = PinnedRing(buffers, lambda: _Mark(self.stream))

    def copy(self, block: Block, target: torch.Tensor) -> None:
        """Returns once the block has been read; it arrives in the order of the stream."""
        if block.dtype is target.dtype and target.is_contiguous() and block.is_dense:
            self._copy_bytes(block, target.flatten().view(torch.uint8))
        else:
            self._copy_lines(block, target)

    def _copy_bytes(self, block: Block, target: torch.Tensor) -> None:
        """Byte by byte, wherever lines end."""
        begin, end = 0, block.nbytes
        while begin < end:
            buffer, view = self._ring.piece(end - begin)
            block.file.read_into(view, block.begin + begin)
            count = len(view)
            target[begin : begin + count].copy_(buffer, non_blocking=True)
            begin += count

    def _copy_lines(self, block: Block, target: torch.Tensor) -> None:
        """Whole lines, moved as they are and then brought into order and dtype by the device."""
        step = max(1, _LINES_BYTES // max(1, block.width))
        for first in range(0, block.lines, step):
            part = block.part(first, min(step, block.lines - first))
            moved = self._moved(part)
            goal = target[first : first + part.lines]
            goal.copy_(moved.view(block.dtype).view(goal.shape))

    def _moved(self, part: Block) -> torch.Tensor:
        """The lines' bytes on the device, as they are stored."""
        moved = torch.empty(part.nbytes, dtype=torch.uint8, device=self._device)
        if part.is_dense:
            self._copy_bytes(part, moved)
        elif part.width > _BUFFER_BYTES:
            for line in range(part.lines):
                begin = line * part.width
                self._copy_bytes(part.part(line, 1), moved[begin : begin + part.width])
        else:
            self._copy_strided(part, moved)
        return moved

    def _copy_strided(self, part: Block, moved: torch.Tensor) -> None:
        step = max(1, _BUFFER_BYTES // part.width)
        for first in range(0, part.lines, step):
            lines = part.part(first, min(step, part.lines - first))
            buffer, view = self._ring.piece(lines.nbytes, least=lines.nbytes)
            lines.fill(np.frombuffer(view, dtype=np.uint8))
            begin = first * part.width
            moved[begin : begin + lines.nbytes].copy_(buffer, non_blocking=True)


class _Mark:
    """An event of one stream: to look the current one up takes as long as a read."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._event = torch.cuda.Event()

    def record(self) -> None:
        """See `Mark`."""
        self._event.record(self._stream)

    def synchronize(self) -> None:
        """See `Mark`."""
        self._event.synchronize()


def _pinned(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, pin_memory=True)
