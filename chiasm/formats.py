"""The media formats that are accepted, by media type: one list for gateway and encoder.

The gateway finds the type by magic bytes and puts it into the plan; the encoder opens the file with
the one decoder listed here and tries no other.
"""

from __future__ import annotations

import struct
import zlib

IMAGE_FORMATS = {
    "image/png": "PNG",
    "image/jpeg": "JPEG",
    "image/webp": "WEBP",
    "image/gif": "GIF",
    "image/bmp": "BMP",
    "image/tiff": "TIFF",
    "image/avif": "AVIF",
}
"""Accepted pictures, and Pillow's name for each."""

VIDEO_FORMATS = {
    "video/mp4": "mov",
    "video/quicktime": "mov",
    "video/webm": "matroska",
    "video/x-matroska": "matroska",
    "video/x-msvideo": "avi",
    "video/mpeg": "mpeg",
    "video/mp2t": "mpegts",
    "video/x-flv": "flv",
    "video/ogg": "ogg",
}
"""Accepted clips, and FFmpeg's demuxer for each: no other demuxer is ever opened, so that no
playlist or script format can name a further file."""

PILLOW_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
    struct.error,
    zlib.error,
)
"""What Pillow's parsers and decoders raise on hostile or broken bytes."""
