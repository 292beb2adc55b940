"""Sizes, counts and timestamps from headers and packets; nothing is decoded here.

Runs in worker threads: every function is synchronous and CPU-bound.
"""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass

from PIL import Image

from chiasm.errors import InvalidMedia, TooLarge
from chiasm.formats import IMAGE_FORMATS, PILLOW_ERRORS
from chiasm.plan import Modality
from gateway.media.bombs import refuse_bombs
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

    @property
    def num_frames(self) -> int:
        """Frames of a clip; 0 for pictures."""
        return len(self.frame_times_s)


def read_header(data: bytes, modality: Modality, *, max_pixels: int, param: str) -> MediaHeader:
    """Reads what planning needs.

    Raises:
        InvalidMedia: Not an accepted format, a bomb, or a header that cannot be read.
        TooLarge: More than `max_pixels` in one picture or frame.
    """
    media_type = sniff(data, modality, param=param)
    refuse_bombs(data, media_type, param=param)
    if modality is Modality.IMAGE:
        height, width = _image_size(data, media_type, param)
        header = MediaHeader(modality, media_type, height, width)
    else:
        clip = read_video(data, media_type, max_pixels=max_pixels, param=param)
        header = MediaHeader(
            modality, media_type, clip.height, clip.width, clip.frame_times_s, clip.duration_s
        )
    if header.height * header.width > max_pixels:
        raise TooLarge(
            f"{header.width}x{header.height} is more than {max_pixels} pixels", param=param
        )
    return header


def _image_size(data: bytes, media_type: str, param: str) -> tuple[int, int]:
    """Height and width as displayed, of the first frame. Our own limit replaces Pillow's."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's own pixel limit warns; ours refuses
            with Image.open(io.BytesIO(data), formats=(IMAGE_FORMATS[media_type],)) as image:
                width, height = image.size
                turned = media_type != "image/tiff" and _orientation(image, data) in _TURNED
    except Image.DecompressionBombError:
        raise TooLarge("the picture has too many pixels", param=param) from None
    except PILLOW_ERRORS:
        raise InvalidMedia(f"the {media_type} header cannot be read", param=param) from None
    if width < 1 or height < 1:
        raise InvalidMedia("the picture has no pixels", param=param)
    return (width, height) if turned else (height, width)


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
