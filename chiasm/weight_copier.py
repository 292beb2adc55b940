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

import torch

from chiasm.stored_tensor import Block

THREADS = 8
"""At most; more of them do not read faster."""
_JOB_BYTES = 64 << 20
_BUFFER_BYTES = 4 << 20  # small enough that the device finds it in the processor's cache
_LINES_BYTES = 16 << 20  # of lines that are put into order one call at a time
_BUFFERS = 2  # of a thread: one is read into while the device copies from the other

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

    def put(self, block: Block, target: torch.Tensor) -> None:
        """See `WeightCopier`."""
        # The target's memory may have been another's, whom the caller's stream still reads.
        is_free = torch.cuda.Event()
        is_free.record(torch.cuda.current_stream(self._device))
        step = max(1, _JOB_BYTES // max(1, block.width))
        for first in range(0, block.lines, step):
            count = min(step, block.lines - first)
            part, goal = block.part(first, count), target[first : first + count]
            self._pending.append(self._pool.submit(self._copy, part, goal, is_free))

    def wait(self) -> None:
        """See `WeightCopier`."""
        for future in self._pending:
            future.result()
        self._pending.clear()
        torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """See `WeightCopier`."""
        self._pool.shutdown(cancel_futures=True)
        torch.cuda.synchronize(self._device)

    @torch.inference_mode()
    def _copy(self, block: Block, target: torch.Tensor, is_free: torch.cuda.Event) -> None:
        lane = getattr(self._lanes, "own", None)
        if lane is None:
            torch.cuda.set_device(self._device)
            lane = self._lanes.own = _Lane(self._device)
        lane.stream.wait_event(is_free)
        lane.copy(block, target)
        with self._lock:
            self._told(target.nbytes)


class _Lane:
    """What one thread copies through."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._device = device
        self._buffers = [_pinned(_BUFFER_BYTES) for _ in range(_BUFFERS)]
        self._copied = [torch.cuda.Event() for _ in range(_BUFFERS)]
        self._next = 0

    def copy(self, block: Block, target: torch.Tensor) -> None:
        """Returns once the block has been read; it arrives in the order of the stream."""
        with torch.cuda.stream(self.stream):
            if block.dtype is target.dtype and target.is_contiguous() and block.is_dense:
                self._copy_bytes(block, target.flatten().view(torch.uint8))
            else:
                self._copy_lines(block, target)

    def _copy_bytes(self, block: Block, target: torch.Tensor) -> None:
        """Byte by byte, wherever lines end."""
        for begin in range(0, block.nbytes, _BUFFER_BYTES):
            count = min(_BUFFER_BYTES, block.nbytes - begin)
            buffer, copied = self._free(count)
            block.file.read_into(buffer.numpy().data, block.begin + begin)
            target[begin : begin + count].copy_(buffer, non_blocking=True)
            copied.record(self.stream)

    def _copy_lines(self, block: Block, target: torch.Tensor) -> None:
        """Whole lines, moved as they are and then brought into order and dtype by the device."""
        step = max(1, _LINES_BYTES // max(1, block.width))
        for first in range(0, block.lines, step):
            part = block.part(first, min(step, block.lines - first))
            buffer, copied = self._free(part.nbytes)
            part.fill(buffer.numpy())
            goal = target[first : first + part.lines]
            moved = buffer.to(self._device, non_blocking=True)
            goal.copy_(moved.view(block.dtype).view(goal.shape))
            copied.record(self.stream)

    def _free(self, count: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        """So many bytes that nothing is copied from any more, and what to record once it is."""
        index, self._next = self._next, (self._next + 1) % _BUFFERS
        self._copied[index].synchronize()
        if count > len(self._buffers[index]):  # lines may be longer
            self._buffers[index] = _pinned(count)
        return self._buffers[index][:count], self._copied[index]


def _pinned(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, pin_memory=True)
