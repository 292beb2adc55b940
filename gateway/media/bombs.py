"""Refuses files that cost far more than their size: counts what parsers would walk or allot.

Pillow walks the blocks before the pixels one by one, libjpeg decodes every scan a picture has, and
FFmpeg allots an index entry to every sample that a table claims: 2 kB can cost gigabytes or hours.
Whatever cameras and editors write is far below every limit here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from chiasm.errors import InvalidMedia

_MAX_BLOCKS = 1 << 16  # chunks, segments, fill bytes: a microsecond or more each
_MAX_SCANS = 100  # of a progressive JPEG; encoders write about 10
_JPEG_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")  # not stuffing, not a restart
_SEQUENTIAL_FRAMES = (0xC0, 0xC1)  # every part of a picture is in one scan
_FRAMES = (*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0))
_STANDALONE = (0x01, *range(0xD0, 0xDA))  # markers without a length
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_TABLES = re.compile(rb"stsz|stz2|trun|cmov")
_MAX_BOXES = 1 << 18  # a day of fragments


def refuse_bombs(data: bytes, media_type: str, *, param: str) -> None:
    """Raises InvalidMedia for a file that no honest program writes."""
    if media_type == "image/png":
        what = _too_many(_png_chunks(data), "chunks")
    elif media_type == "image/gif":
        what = _too_many(_gif_blocks(data), "blocks")
    elif media_type == "image/jpeg":
        what = _jpeg(data)
    elif media_type in ("video/mp4", "video/quicktime"):
        what = _iso_samples(data)
    else:
        what = ""
    if what:
        raise InvalidMedia(f"the {media_type} file {what}", param=param)


def _too_many(blocks: Iterator[int], name: str) -> str:
    count = sum(1 for _, _ in zip(range(_MAX_BLOCKS + 1), blocks, strict=False))
    return f"has more than {_MAX_BLOCKS} {name}" if count > _MAX_BLOCKS else ""


def _png_chunks(data: bytes) -> Iterator[int]:
    at = 8
    while at + 8 <= len(data) and data[at + 4 : at + 8] != b"IEND":
        yield at
        at += 12 + int.from_bytes(data[at : at + 4], "big")


def _gif_blocks(data: bytes) -> Iterator[int]:
    """Blocks and sub-blocks up to the first frame: nothing behind it is read."""
    flags = data[10] if len(data) > 10 else 0
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    while at + 2 < len(data) and data[at] not in b",;":
        yield at
        extension = data[at] == ord("!")
        at += 2 if extension else 1
        while extension and at < len(data) and data[at]:
            yield at
            at += 1 + data[at]


def _jpeg(data: bytes) -> str:
    """Scans and segments; nothing is looked for behind the one scan of most cameras' pictures.

    That one has all components of a sequential frame: libjpeg reads no further, and refuses a file
    in which another follows.
    """
    at, scans, frames = 2, 0, []
    for _ in range(_MAX_BLOCKS):
        if at + 4 > len(data):
            return ""
        marker = data[at + 1]
        if data[at] != 0xFF or marker in (0x00, 0xFF):
            at += 1
            continue
        if marker == _END_OF_IMAGE and scans:
            return ""
        segment = data[at + 4 : at + 10]
        at += 2 if marker in _STANDALONE else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if marker in _FRAMES:
            frames.append((marker, segment[5:]))
        if marker == _START_OF_SCAN:
            scans += 1
            if frames in [[(kind, segment[:1])] for kind in _SEQUENTIAL_FRAMES]:
                return ""
            following = _JPEG_MARKER.search(data, at)
            if scans > _MAX_SCANS:
                return f"has more than {_MAX_SCANS} scans"
            if following is None:
                return ""
            at = following.start()
    return f"has more than {_MAX_BLOCKS} segments"


def _iso_samples(data: bytes) -> str:
    """Every sample has a byte of its own, and a listed size has four in its table."""
    claimed = 0
    for steps, (kind, first, second) in enumerate(_sample_tables(data)):
        if kind == b"cmov":  # a header inside a zlib stream, of whatever size
            return "has a compressed header"
        if kind == b"trun":
            claimed += first
        elif kind == b"stsz":
            claimed += first * second if first else 4 * second
        elif kind == b"stz2":
            claimed += second // 2  # of four bits at least
        if claimed > len(data):
            return f"claims {claimed} bytes of samples and has {len(data)}"
        if steps > _MAX_BOXES:
            return f"has more than {_MAX_BOXES} boxes"
    return ""


def _sample_tables(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Kind and the first two numbers of every table, and an empty kind for every box."""
    for box in _boxes(data):
        yield b"", 0, 0
        for table in _TABLES.finditer(box):
            at = table.end() + 4  # behind version and flags
            first, second = box[at : at + 4], box[at + 4 : at + 8]
            yield table.group(), int.from_bytes(first, "big"), int.from_bytes(second, "big")


def _boxes(data: bytes) -> Iterator[bytes]:
    """Every top-level box; those that hold nothing but samples come empty."""
    at = 0
    while at + 8 <= len(data):
        size, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        if size == 1:
            size = int.from_bytes(data[at + 8 : at + 16], "big")
        if size < 8:
            size = len(data) - at
        yield b"" if kind == b"mdat" else data[at : at + size]
        at += size
