"""Tensors in safetensors files, and rectangles of their bytes. Nothing is read before it is asked
for; any thread may read."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from chiasm.tensor_header import TensorEntry, read_header

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class TensorFile:
    """An open safetensors file. Close it once nothing reads any more.

    Args:
        path: The file.

    Raises:
        ValueError: It is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(path, framework="numpy"):  # all of its header is looked through
                pass
        except SafetensorError as error:
            raise ValueError(f"{path} is no whole safetensors file: {error}") from None
        self._entries = list(read_header(path))
        self._fd = os.open(path, os.O_RDONLY)
        self._map: mmap.mmap | None = None

    def tensors(self) -> Iterator[StoredTensor]:
        """All of them, as they are listed."""
        return (StoredTensor(self, entry) for entry in self._entries)

    def read_into(self, target: memoryview, begin: int) -> None:
        """Fills the target with the bytes from `begin` on. Raises ValueError where they end."""
        while target:
            count = os.preadv(self._fd, [target], begin)
            if count == 0:
                raise ValueError(f"{self.path} is cut short")
            target, begin = target[count:], begin + count

    def mapped(self) -> np.ndarray:
        """The whole file as bytes [size], read where it is touched."""
        if self._map is None:
            self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
        return np.frombuffer(self._map, dtype=np.uint8)

    def close(self) -> None:
        """Lets go of the file; the mapping goes with the last array of it."""
        os.close(self._fd)
        self._map = None


@dataclass(frozen=True, slots=True)
class Block:
    """Lines of a file, equally long and equally far apart: a rectangle of a tensor."""

    file: TensorFile
    dtype: torch.dtype
    begin: int
    """Byte of the file that the first line begins at."""
    lines: int
    width: int
    """Bytes of a line."""
    pitch: int
    """Bytes from the beginning of one line to the next."""

    @property
    def nbytes(self) -> int:
        """Of all lines."""
        return self.lines * self.width

    @property
    def is_dense(self) -> bool:
        """Whether lines follow each other."""
        return self.pitch == self.width or self.lines == 1

    def part(self, first: int, count: int) -> Block:
        """Some of the lines."""
        begin = self.begin + first * self.pitch
        return Block(self.file, self.dtype, begin, count, self.width, self.pitch)

    def fill(self, target: np.ndarray) -> None:
        """Reads the lines end to end into bytes [nbytes], without holding the interpreter."""
        if self.is_dense:
            self.file.read_into(target.data, self.begin)
            return
        step = (self.pitch, 1)
        source = self.file.mapped()[self.begin :]
        lines = np.lib.stride_tricks.as_strided(source, (self.lines, self.width), step)
        np.copyto(target.reshape(self.lines, self.width), lines)

    def read(self) -> torch.Tensor:
        """The values, end to end."""
        values = torch.empty(self.nbytes, dtype=torch.uint8)
        self.fill(values.numpy())
        return values.view(self.dtype)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file."""

    file: TensorFile
    entry: TensorEntry

    @property
    def name(self) -> str:
        """As the file calls it."""
        return self.entry.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        return self.entry.shape

    @property
    def dtype(self) -> torch.dtype:
        """Raises ValueError for one that torch lacks, or that its bytes are not of."""
        entry = self.entry
        known = _DTYPES.get(entry.dtype)
        if known is None or entry.numel * known.itemsize != entry.end - entry.begin:
            raise ValueError(f"{self.file.path}: tensor {entry.name} of dtype {entry.dtype}")
        return known

    def whole(self) -> Block:
        """All of it, a line for each index of the first dimension."""
        lines = self.shape[0] if self.shape else 1
        return self.rows(0, lines)

    def rows(self, begin: int, end: int) -> Block:
        """The indices [begin, end) of the first dimension, a line each."""
        width = math.prod(self.shape[1:]) * self.dtype.itemsize
        return Block(
            self.file, self.dtype, self.entry.begin + begin * width, end - begin, width, width
        )

    def rectangle(self, rows: slice, columns: slice, index: int = 0) -> Block:
        """Of the matrix, or of the `index`-th of several stacked ones: rows, a line each."""
        height, width = self.shape[-2:]
        item = self.dtype.itemsize
        first = (index * height + rows.start) * width + columns.start
        begin = self.entry.begin + first * item
        lines, wide = rows.stop - rows.start, columns.stop - columns.start
        return Block(self.file, self.dtype, begin, lines, wide * item, width * item)
