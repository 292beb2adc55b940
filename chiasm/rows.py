"""The format of embedding rows on the wire and in a slab: sizes in bytes, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from chiasm.v1 import common_pb2

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class RowFormat:
    """One row: `levels` vectors of `hidden_size` values, concatenated, level 0 first."""

    hidden_size: int
    levels: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in _BYTES:
            raise ValueError(f"unknown row dtype {self.dtype!r}; known: {', '.join(_BYTES)}")
        if self.hidden_size < 1 or self.levels < 1:
            raise ValueError(f"impossible row format {self}")

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, all levels."""
        return self.hidden_size * self.levels * _BYTES[self.dtype]

    def to_proto(self) -> common_pb2.RowFormat:
        """The wire value."""
        return common_pb2.RowFormat(
            hidden_size=self.hidden_size,
            levels=self.levels,
            dtype=f"DTYPE_{self.dtype.upper()}",
        )

    @classmethod
    def from_proto(cls, message: common_pb2.RowFormat) -> RowFormat:
        """Raises ValueError for a dtype this build does not know."""
        name = common_pb2.DType.Name(message.dtype).removeprefix("DTYPE_").lower()
        return cls(message.hidden_size, message.levels, name)
