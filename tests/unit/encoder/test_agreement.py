"""Gateway and encoder read the same file alike: sizes as displayed, numbers of frames."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from PIL import Image

from chiasm.plan import Modality
from encoder_svc.pixels.image import decode_image
from encoder_svc.pixels.video import decode_frames
from gateway.media.header import read_header
from tests.unit.encoder.clips import HEIGHT, WIDTH, clip, number
from tests.unit.encoder.test_image import PILLOW, save, scene
from tests.unit.encoder.test_video import KINDS

LIMIT = 1 << 26


@pytest.mark.parametrize("name", PILLOW)
@pytest.mark.parametrize("orientation", [1, 3, 5, 6, 8])
def test_pictures(name: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {} if name in ("GIF", "BMP") else {"exif": exif}
    data = save(scene((40, 24)), name, **options)
    header = read_header(data, Modality.IMAGE, max_pixels=LIMIT, param="")
    picture = decode_image(data, header.media_type, height=header.height, width=header.width)
    assert picture.size == (header.width, header.height)


@pytest.mark.parametrize("kind", KINDS)
def test_clips(kind: str) -> None:
    media_type, options = KINDS[kind]
    data = clip(23, **options)
    header = read_header(data, Modality.VIDEO, max_pixels=LIMIT, param="")
    assert (header.media_type, header.num_frames) == (media_type, 23)
    last = header.num_frames - 1
    frames = decode_frames(data, media_type, (0, last), height=header.height, width=header.width)
    assert [number(frame) for frame in frames if frame is not None] == [0, last]


def test_a_turned_clip() -> None:
    still = np.zeros((HEIGHT, WIDTH, 3), dtype=np.uint8)
    data = bytearray(clip(2, still=[still, still]))
    struct.pack_into(
        ">9i", data, data.index(b"tkhd") + 44, 0, 65536, 0, -65536, 0, 0, 0, 0, 1 << 30
    )
    header = read_header(bytes(data), Modality.VIDEO, max_pixels=LIMIT, param="")
    assert (header.height, header.width) == (WIDTH, HEIGHT)
