"""Sizes, counts and timestamps from headers and packets; nothing is decoded here.

Runs in worker threads: every function is synchronous and CPU-bound.
"""

from __future__ import annotations

import io
import sys
import warnings
from dataclasses import dataclass

from PIL import Image

from chiasm.errors import InvalidMedia, TooLarge
from chiasm.formats import IMAGE_FORMATS, PILLOW_ERRORS
from chiasm.plan import Modality
from gateway.media.bombs import refuse_bombs
from gateway.media.decode_cost import clip_bytes, picture_bytes
from gateway.media.sniff import sniff
from gateway.media.video import read_video

_ORIENTATION_TAG = 0x0112
_TURNED = (5, 6, 7, 8)
_PNG_SIGNATURE_BYTES = 8


@dataclass(frozen=True, slots=True)
class MediaHeader:
    """What a file says about itself. Sizes are as displayed: turned by EXIF or display matrix."""

    modality: Modality
    media_type: str
    height: int
    width: int
    frame_times_s: tuple[float, ...] = ()
    """Of every frame of a clip, in display order, from 0; empty for pictures."""
    duration_s: float = 0.0
    decode_bytes: int = 0
    """Memory that decoding it takes, reckoned."""

    @property
    def num_frames(self) -> int:
        """Frames of a clip; 0 for pictures."""
        return len(self.frame_times_s)


def read_header(
    data: bytes,
    modality: Modality,
    *,
    max_pixels: int,
    max_decode_bytes: int = sys.maxsize,
    param: str,
) -> MediaHeader:
    """Reads what planning needs.

    Raises:
        InvalidMedia: Not an accepted format, a bomb, or a header that cannot be read.
        TooLarge: More than `max_pixels` in one picture or frame, or more than `max_decode_bytes`
            of memory to decode it.
    """
    media_type = sniff(data, modality, param=param)
    refuse_bombs(data, media_type, param=param)
    if modality is Modality.IMAGE:
        header = _read_image(data, media_type, param)
    else:
        clip = read_video(data, media_type, max_pixels=max_pixels, param=param)
        header = MediaHeader(
            modality,
            media_type,
            clip.height,
            clip.width,
            clip.frame_times_s,
            clip.duration_s,
            clip_bytes(pixels=clip.height * clip.width),
        )
    size = f"{header.width}x{header.height}"
    if header.height * header.width > max_pixels:
        raise TooLarge(f"{size} is more than {max_pixels} pixels", param=param)
    if header.decode_bytes > max_decode_bytes:
        raise TooLarge(
            f"{size} pixels of this kind of {media_type} take {header.decode_bytes} bytes to "
            f"decode; at most {max_decode_bytes}",
            param=param,
        )
    return header


def _read_image(data: bytes, media_type: str, param: str) -> MediaHeader:
    """Size as displayed, of the first frame. Our own limit replaces Pillow's."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's own pixel limit warns; ours refuses
            with Image.open(io.BytesIO(data), formats=(IMAGE_FORMATS[media_type],)) as image:
                width, height = image.size
                cost = picture_bytes(media_type, image.mode, pixels=width * height)
                turned = media_type != "image/tiff" and _orientation(image, data) in _TURNED
    except Image.DecompressionBombError:
        raise TooLarge("the picture has too many pixels", param=param) from None
    except PILLOW_ERRORS:
        raise InvalidMedia(f"the {media_type} header cannot be read", param=param) from None
    if width < 1 or height < 1:
        raise InvalidMedia("the picture has no pixels", param=param)
    if turned:
        width, height = height, width
    return MediaHeader(Modality.IMAGE, media_type, height, width, decode_bytes=cost)


def _orientation(image: Image.Image, data: bytes) -> int:
    """EXIF orientation without loading pixels. PNG may carry it behind them, so look there."""
    if image.format == "PNG" and "exif" not in image.info:
        late = _png_exif(data)
        if late is not None:
            image.info["exif"] = late
    try:
        # PngImageFile.getexif would decode the whole picture; the base class does not.
        value = Image.Image.getexif(image).get(_ORIENTATION_TAG, 1)
    except PILLOW_ERRORS:
        return 1  # broken EXIF is ignored, as decoders do
    return value if isinstance(value, int) else 1


def _png_exif(data: bytes) -> bytes | None:
    at = _PNG_SIGNATURE_BYTES
    while at + 8 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        if data[at + 4 : at + 8] == b"eXIf":
            return b"Exif\x00\x00" + data[at + 8 : at + 8 + size]
        at += 12 + size
    return None
