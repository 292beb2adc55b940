"""Decodes one still picture: the format the plan names, the first frame, upright, in RGB."""

from __future__ import annotations

import io

from PIL import Image, ImageOps

from chiasm.errors import InvalidMedia, TooLarge
from chiasm.formats import IMAGE_FORMATS, PILLOW_ERRORS
from encoder_svc.pixels.modes import to_rgb

MAX_SOURCE_PIXELS = 178_956_970
"""Pixels of one picture or frame as stored, Pillow's own bound: 512 MiB in RGB."""


def decode_image(media: bytes, media_type: str, *, height: int, width: int) -> Image.Image:
    """The picture as displayed, mode RGB.

    Args:
        media: The file's bytes.
        media_type: By magic bytes; selects the only decoder that is tried.
        height: As the plan says it, after EXIF orientation.
        width: Likewise.

    Raises:
        InvalidMedia: Truncated, corrupt, of another format, or of another size than planned.
        TooLarge: More than MAX_SOURCE_PIXELS.
    """
    name = IMAGE_FORMATS.get(media_type)
    if name is None:
        accepted = ", ".join(sorted(IMAGE_FORMATS))
        raise InvalidMedia(f"{media_type or 'unknown type'} is no picture; accepted: {accepted}")
    try:
        with Image.open(io.BytesIO(media), formats=(name,)) as image:
            _check_header(image.size, height=height, width=width)
            image.load()
            picture = to_rgb(_upright(image))
    except (InvalidMedia, TooLarge):
        raise
    except Image.DecompressionBombError:
        raise TooLarge(f"a picture of {width}x{height} pixels is too large") from None
    except PILLOW_ERRORS as error:
        raise InvalidMedia(f"the {name} picture is truncated or corrupt") from error
    if picture.size != (width, height):
        raise InvalidMedia(_mismatch(picture.size, height=height, width=width))
    return picture


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except PILLOW_ERRORS:
        return image  # an unreadable EXIF block is no reason to refuse the picture


def _check_header(size: tuple[int, int], *, height: int, width: int) -> None:
    """Before a byte is decoded: what the header promises is what was planned, either way up."""
    if sorted(size) != sorted((height, width)):
        raise InvalidMedia(_mismatch(size, height=height, width=width))


def _mismatch(size: tuple[int, int], *, height: int, width: int) -> str:
    return f"the picture is {size[0]}x{size[1]} pixels where {width}x{height} were planned"
