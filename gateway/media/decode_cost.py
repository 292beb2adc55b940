"""What it takes to decode a picture, reckoned from its header: bytes of memory at the peak.

A file of 90 bytes may say that it is 11,000 pixels wide and high, and decoders believe it. The
factors are measured: the encoder's decoding, orientation and conversion to RGB together.
"""

from __future__ import annotations

_PLAIN = 8  # decoded once, converted once
_BY_MODE = {
    "CMYK": 12,
    "RGBA": 20,
    "RGBa": 20,
    "LA": 20,
    "PA": 20,
    "I": 34,
    "I;16": 34,
    "I;16B": 34,
    "I;16L": 34,
    "I;16N": 34,
    "F": 34,
}
_CANVASES = 8  # more, where the decoder keeps the frame it shows beside the one it makes
_WITH_CANVASES = ("image/webp", "image/avif", "image/gif")
_FRAMES = 32  # bytes a pixel: a codec's reference frames and one in RGB


def picture_bytes(media_type: str, mode: str, *, pixels: int) -> int:
    """Peak memory of one picture; `mode` is Pillow's."""
    factor = _BY_MODE.get(mode, _PLAIN) + (_CANVASES if media_type in _WITH_CANVASES else 0)
    return factor * pixels


def clip_bytes(*, pixels: int) -> int:
    """Peak memory of one clip whose frames have so many pixels: they are decoded one by one."""
    return _FRAMES * pixels
