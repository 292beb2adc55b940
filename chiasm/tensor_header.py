"""The header of a safetensors file: which tensor lies where. No torch.

safetensors' own reader hands out values, not places; digests, and copies to a GPU at the speed of
the files, need the places.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LONGEST = 100 << 20  # bytes of a header, as safetensors itself allows
_METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor as its file describes it."""

    name: str
    dtype: str
    """As safetensors calls it: BF16, F8_E4M3, ..."""
    shape: tuple[int, ...]
    begin: int
    """Of its bytes, from the start of the file."""
    end: int

    @property
    def numel(self) -> int:
        """Values of it."""
        return math.prod(self.shape)


def read_header(path: Path) -> Iterator[TensorEntry]:
    """The tensors of a file.

    Raises:
        ValueError: It is no safetensors file, or is cut short.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
        if not 2 <= length <= min(_LONGEST, size - 8):
            raise ValueError(f"{path} is no safetensors file")
        try:
            header = json.loads(file.read(length))
        except ValueError:
            raise ValueError(f"{path} is no safetensors file") from None
    base = 8 + length
    for name, entry in header.items():
        if name == _METADATA:
            continue
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end <= size - base:
            raise ValueError(f"{path} is cut short: {name} ends behind it")
        yield TensorEntry(name, entry["dtype"], tuple(entry["shape"]), base + begin, base + end)
