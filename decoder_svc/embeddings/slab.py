"""The memory that rows land in: one shared-memory block, written by the fetcher, read by ranks."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
from pathlib import Path

from chiasm.transport.base import DRAM, Region

_FOLDER = Path("/dev/shm")
_PREFIX = "chiasm-slab-"


class Slab:
    """`size` bytes that processes of one machine share by name.

    The creator unlinks it, and holds a lock on it as long as it lives; ranks attach by name and
    only close it. What a creator that was killed left behind is removed by the next one.

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
        self._lock: int | None = None
        if name is None:
            _sweep()
            self.name, file = _create(size)
            self._lock = file
            self._map = mmap.mmap(file, size)
        else:
            self.name = name
            file = os.open(_FOLDER / name, os.O_RDWR)
            try:
                self._map = mmap.mmap(file, size)
            finally:
                os.close(file)
        self._view = memoryview(self._map)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Copies bytes in. Raises ValueError when they would leave the slab."""
        end = offset + len(data)
        if offset < 0 or end > self.size:
            raise ValueError(f"bytes [{offset}, {end}) lie outside a slab of {self.size}")
        self._view[offset:end] = data

    def view(self) -> memoryview:
        """All bytes, shared. Release it before `close`."""
        return self._view

    @property
    def region(self) -> Region:
        """Where the bytes lie in this process. It must not be used once this is closed."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        return Region(address, self.size, DRAM)

    def close(self) -> None:
        """Lets go of the memory; the creator also removes it. Idempotent."""
        self._view.release()
        if self._lock is not None:
            lock, self._lock = self._lock, None
            (_FOLDER / self.name).unlink(missing_ok=True)
            os.close(lock)

    def __enter__(self) -> Slab:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


def _create(size: int) -> tuple[str, int]:
    """A new block, locked: its name and its descriptor."""
    while True:
        path = _FOLDER / f"{_PREFIX}{secrets.token_hex(8)}"
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists():  # else another creator swept it before it was locked
            os.ftruncate(file, size)
            return path.name, file
        os.close(file)


def _sweep() -> None:
    """Removes blocks that nobody holds a lock on: their creators were killed."""
    for path in _FOLDER.glob(f"{_PREFIX}*"):
        try:
            file = os.open(path, os.O_RDWR)
        except OSError:  # gone meanwhile, or another user's
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            pass
        finally:
            os.close(file)
