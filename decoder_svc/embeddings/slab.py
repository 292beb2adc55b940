"""The memory that rows land in: one shared-memory block, written by the fetcher, read by ranks."""

from __future__ import annotations

import mmap
import os
from multiprocessing import shared_memory


class Slab:
    """`size` bytes that processes of one machine share by name.

    The creator unlinks it; ranks attach by name and only close it.

    Args:
        size: Bytes; rounded up to the system's page by the kernel, never shown.
        name: Attach to this block instead of making one.

    Raises:
        FileNotFoundError: No block of that name on this machine.
    """

    def __init__(self, size: int, *, name: str | None = None) -> None:
        if size < 1:
            raise ValueError(f"a slab needs at least one byte, got {size}")
        self.size = size
        self._block: shared_memory.SharedMemory | None = None
        if name is None:
            self._block = shared_memory.SharedMemory(create=True, size=size)
            memory = self._block.buf
            assert memory is not None, "a new block has memory"
            self.name = self._block.name
        else:
            # Not by SharedMemory: until Python 3.13 it hands an attached block to the resource
            # tracker, which unlinks it when this process ends, under the creator's feet.
            file = os.open(os.path.join("/dev/shm", name.lstrip("/")), os.O_RDWR)
            try:
                self._map = mmap.mmap(file, size)
            finally:
                os.close(file)
            memory = memoryview(self._map)
            self.name = name
        self._view = memory[:size]

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Copies bytes in. Raises ValueError when they would leave the slab."""
        end = offset + len(data)
        if offset < 0 or end > self.size:
            raise ValueError(f"bytes [{offset}, {end}) lie outside a slab of {self.size}")
        self._view[offset:end] = data

    def view(self) -> memoryview:
        """All bytes, shared. Release it before `close`."""
        return self._view

    def close(self) -> None:
        """Lets go of the memory; the creator also removes it. Idempotent."""
        self._view.release()
        if self._block is not None:
            block, self._block = self._block, None
            block.close()
            block.unlink()

    def __enter__(self) -> Slab:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()
