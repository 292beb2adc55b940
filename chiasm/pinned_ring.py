"""Buffers that a device copies from while others are written.

What is written is packed: many small pieces share a buffer, and only a full one is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

_APART = 64
"""Bytes that pieces begin at multiples of."""


class Mark(Protocol):
    """A moment in the order of the device's work."""

    def record(self) -> None:
        """After all that has been ordered so far."""

    def synchronize(self) -> None:
        """Returns once the device has come to it; at once if it was never recorded."""


class PinnedRing:
    """Not for several threads.

    Args:
        buffers: Bytes, equally many in each; two or more.
        mark: Makes one, in the order of the stream that pieces are copied in.
    """

    def __init__(self, buffers: list[torch.Tensor], mark: Callable[[], Mark]) -> None:
        self._buffers = [(buffer, buffer.numpy().data) for buffer in buffers]
        self._marks = [mark() for _ in buffers]
        self._size = buffers[0].numel()
        self._current = 0
        self._used = 0

    def piece(self, most: int, *, least: int = 1) -> tuple[torch.Tensor, memoryview]:
        """Bytes to write, and the same as a tensor to copy from. Copies from what was handed out
        before must have been ordered by now.

        Args:
            most: How many are wanted; fewer come where a buffer ends.
            least: How many are of use; no more than a buffer has.
        """
        if self._size - self._used < least:
            self._turn()
        begin = self._used
        end = min(begin + most, self._size)
        self._used = -(-end // _APART) * _APART
        buffer, view = self._buffers[self._current]
        return buffer[begin:end], view[begin:end]

    def _turn(self) -> None:
        self._marks[self._current].record()
        self._current = (self._current + 1) % len(self._buffers)
        self._marks[self._current].synchronize()
        self._used = 0
