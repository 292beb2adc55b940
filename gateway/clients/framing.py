"""Protobuf's wire format, where the library would copy a megabyte three times."""

from __future__ import annotations

from collections.abc import Iterable

_LENGTH_DELIMITED = 2
_MORE = 0x80

Buffers = tuple[bytes | memoryview, ...]
"""A message in pieces, to be joined once."""


def field_head(number: int, size: int) -> bytes:
    """What stands before the `size` bytes of a field of bytes, or of a message."""
    head = bytearray((number << 3 | _LENGTH_DELIMITED,))
    while size >= _MORE:
        head.append(size & _MORE - 1 | _MORE)
        size >>= 7
    head.append(size)
    return bytes(head)


def size_of(buffers: Iterable[bytes | memoryview]) -> int:
    """Bytes of all of them."""
    return sum(map(len, buffers))
