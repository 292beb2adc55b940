"""Rows that say whose they are: every row's bytes name its digest and its index."""

from __future__ import annotations

import hashlib

from chiasm.plan import Span

NAN_BYTE = b"\xff"  # repeated, it is a NaN in float32, float16 and bfloat16


def pattern_row(digest: bytes, row: int, row_bytes: int) -> bytes:
    """The bytes of one row: small finite numbers in every row dtype, different for every row."""
    name = hashlib.sha256(digest + row.to_bytes(8, "big")).digest()[:8]
    words = bytes(byte for value in name for byte in (value, 0x3C))
    return (words * (row_bytes // len(words) + 1))[:row_bytes]


def pattern_rows(digest: bytes, rows: Span, row_bytes: int) -> bytes:
    """The bytes of a run of rows."""
    return b"".join(pattern_row(digest, row, row_bytes) for row in range(rows.begin, rows.end))
