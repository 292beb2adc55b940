"""One still picture: modes, orientation, animation, broken files, types that lie."""

from __future__ import annotations

import contextlib
import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from chiasm.errors import InvalidMedia, TooLarge
from encoder_svc.pixels.image import decode_image
from encoder_svc.pixels.modes import to_rgb

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)
PILLOW = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
PILLOW |= {"BMP": "image/bmp", "TIFF": "image/tiff", "AVIF": "image/avif"}


def save(image: Image.Image, name: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, name, **options)
    return file.getvalue()


def decode(data: bytes, media_type: str, size: tuple[int, int]) -> np.ndarray:
    """Decodes a picture of (width, height)."""
    image = decode_image(data, media_type, height=size[1], width=size[0])
    assert image.mode == "RGB"
    return np.asarray(image)


def scene(size: tuple[int, int] = (32, 24)) -> Image.Image:
    """Red on the left, blue on the right."""
    image = Image.new("RGB", size, RED)
    image.paste(BLUE, (size[0] // 2, 0, *size))
    return image


@pytest.mark.parametrize("name", PILLOW)
def test_every_accepted_format(name: str) -> None:
    image = scene()
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 95, "subsampling": 0}}
    pixels = decode(save(image, name, **options.get(name, {})), PILLOW[name], image.size)
    assert pixels.shape == (24, 32, 3)
    middles = pixels[12, [4, 27]].astype(int)  # away from the edge that AVIF's chroma blurs
    assert np.abs(middles - [RED, BLUE]).max() < 12


@pytest.mark.parametrize("size", [(224, 224), (1, 1), (1, 3), (3, 1), (3, 3), (4, 3)])
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16"])
def test_modes_and_shapes_that_read_as_channels_first(mode: str, size: tuple[int, int]) -> None:
    """Whatever the mode, height x width x 3 comes out."""
    if mode == "I;16":
        image = Image.fromarray(np.full((size[1], size[0]), 255 * 257, np.uint16))
    else:
        image = Image.new("L", size, 255).convert(mode)
    pixels = decode(save(image, "PNG"), "image/png", size)
    assert pixels.shape == (size[1], size[0], 3)
    assert (pixels == 255).all()


def test_grayscale_jpeg() -> None:
    data = save(Image.new("L", (224, 224), 77), "JPEG")
    assert (decode(data, "image/jpeg", (224, 224)) == 77).all()


@pytest.mark.parametrize("name", ["PNG", "TIFF"])
def test_sixteen_bit_gray_is_scaled_not_clamped(name: str) -> None:
    """A ramp over 16 bits keeps 256 levels."""
    ramp = np.linspace(0, 65535, 512, dtype=np.uint16).reshape(1, 512).repeat(4, 0)
    pixels = decode(save(Image.fromarray(ramp), name), PILLOW[name], (512, 4))
    assert len(np.unique(pixels)) == 256
    assert np.abs(pixels[:, :, 0] - ramp / 257).max() <= 0.5


def test_other_wide_grays() -> None:
    big_endian = Image.fromarray(np.array([[0, 257, 65535]], dtype=">u2"))
    assert np.asarray(to_rgb(big_endian))[0, :, 0].tolist() == [0, 1, 255]
    wide = Image.fromarray(np.array([[0, 257, 65535]], dtype=np.int32))
    assert wide.mode == "I"
    assert np.asarray(to_rgb(wide))[0, :, 0].tolist() == [0, 1, 255]
    unit = Image.fromarray(np.array([[0.0, 0.5, 1.0, np.nan]], dtype=np.float32))
    assert np.asarray(to_rgb(unit))[0, :, 0].tolist() == [0, 128, 255, 0]
    bytes_ = Image.fromarray(np.array([[0.0, 5.0, 255.0]], dtype=np.float32))
    assert np.asarray(to_rgb(bytes_))[0, :, 0].tolist() == [0, 5, 255]


def test_sixteen_bit_gray_with_a_transparent_level() -> None:
    values = np.array([[100 * 257, 7 * 257]], dtype=np.uint16)
    raw = zlib.compress(b"\0" + values.astype(">u2").tobytes())
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", 2, 1, 16, 0, 0, 0, 0)),
        (b"tRNS", struct.pack(">H", 7 * 257)),
        (b"IDAT", raw),
        (b"IEND", b""),
    ]
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )
    assert decode(data, "image/png", (2, 1))[0].tolist() == [[100] * 3, [255] * 3]


def test_cmyk_jpeg_with_and_without_adobes_marker() -> None:
    """Cyan stays cyan; four-ink JPEGs are inverted whether or not they say so."""
    data = save(Image.new("CMYK", (32, 24), (255, 0, 0, 0)), "JPEG", quality=95)
    at = data.index(b"\xff\xee")
    (length,) = struct.unpack(">H", data[at + 2 : at + 4])
    assert data[at + 4 : at + 9] == b"Adobe"
    bare = data[:at] + data[at + 2 + length :]
    for file in (data, bare):
        colour = decode(file, "image/jpeg", (32, 24))[12, 16].tolist()
        assert colour[0] < 10 and min(colour[1:]) > 245


def test_ycck_jpeg() -> None:
    """The inks go through YCbCr as if they were RGB, black stays apart, and Adobe says so."""
    inks = Image.new("RGB", (16, 16), (0, 215, 215))  # cyan, magenta, yellow; no black
    stored = (*inks.convert("YCbCr").split(), Image.new("L", inks.size, 255))
    # Pillow stores the complement of what it is given.
    given = [Image.eval(plane, lambda v: 255 - v) for plane in stored]
    data = save(Image.merge("CMYK", given), "JPEG", quality=100)
    at = data.index(b"Adobe") + 11
    data = data[:at] + b"\x02" + data[at + 1 :]  # transform 2 = YCCK
    colour = decode(data, "image/jpeg", (16, 16))[8, 8].tolist()
    assert np.abs(np.array(colour) - (255, 40, 40)).max() <= 4


@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(name: str, orientation: int) -> None:
    """The plan has the turned size; the file holds the picture turned back."""
    upright = scene((40, 24))
    undo = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    stored = upright if undo is None else upright.transpose(undo)
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 95, "subsampling": 0}}
    data = save(stored, name, exif=exif, **options.get(name, {}))
    pixels = decode(data, PILLOW[name], (40, 24))
    assert np.abs(pixels.astype(int) - np.asarray(upright)).max() < 12


def test_alpha_lies_on_white() -> None:
    half = Image.new("RGBA", (4, 4), (0, 0, 0, 128))
    assert decode(save(half, "PNG"), "image/png", (4, 4))[0, 0].tolist() == [127] * 3
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert decode(save(clear, "PNG"), "image/png", (4, 4))[0, 0].tolist() == [255] * 3
    keyed = save(Image.new("RGB", (4, 4), RED), "PNG", transparency=RED)
    assert decode(keyed, "image/png", (4, 4))[0, 0].tolist() == [255] * 3


@pytest.mark.parametrize("name", ["GIF", "WEBP", "PNG"])
def test_animation_shows_its_first_frame(name: str) -> None:
    """The first frame, and only that one is decoded."""
    frames = [Image.new("RGB", (16, 16), colour) for colour in (RED, GREEN, BLUE)]
    options = {"lossless": True} if name == "WEBP" else {}
    data = save(frames[0], name, save_all=True, append_images=frames[1:], duration=50, **options)
    assert Image.open(io.BytesIO(data)).n_frames == 3
    first = decode(data, PILLOW[name], (16, 16))
    assert np.abs(first.astype(int) - RED).max() <= 2
    assert np.array_equal(first, decode(data, PILLOW[name], (16, 16)))


def test_a_gif_of_thousands_of_frames_costs_one() -> None:
    """The frames behind the first are not even looked at, so rubble there does no harm."""
    frames = [Image.new("P", (8, 8), i % 7) for i in range(300)]
    data = save(frames[0], "GIF", save_all=True, append_images=frames[1:], optimize=False)
    cut = data[: len(data) // 2]
    assert decode(cut, "image/gif", (8, 8)).shape == (8, 8, 3)


def noisy(name: str) -> bytes:
    rng = np.random.default_rng(0)
    return save(Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)), name)


def broken_files() -> dict[str, tuple[bytes, str]]:
    png = noisy("PNG")
    at = png.index(b"IDAT") + 40
    return {
        "jpeg minus 128 bytes": (noisy("JPEG")[:-128], "image/jpeg"),
        "png with a bad checksum": (png[:at] + bytes([png[at] ^ 1]) + png[at + 1 :], "image/png"),
        "png cut short": (png[: len(png) // 2], "image/png"),
        "webp cut short": (noisy("WEBP")[:-200], "image/webp"),
        "tiff cut short": (noisy("TIFF")[:-2000], "image/tiff"),
        "bmp cut short": (noisy("BMP")[:-2000], "image/bmp"),
        "gif cut short": (noisy("GIF")[:-1000], "image/gif"),
        "avif cut short": (noisy("AVIF")[:-500], "image/avif"),
        "empty": (b"", "image/png"),
        "html": (b"<!doctype html><html><body>404</body></html>", "image/png"),
        "text": (b"hello, I am a text file", "image/png"),
        "signature alone": (b"\x89PNG\r\n\x1a\n", "image/png"),
    }


@pytest.mark.parametrize("case", broken_files())
def test_broken_files_are_the_clients_fault(case: str) -> None:
    """One clean sentence, no bytes of the file, no trace."""
    data, media_type = broken_files()[case]
    with pytest.raises(InvalidMedia) as caught:
        decode_image(data, media_type, height=64, width=64)
    message = caught.value.message
    assert message.startswith("the ") and "corrupt" in message and "\n" not in message


@pytest.mark.filterwarnings("ignore:.*:UserWarning:PIL")
def test_random_damage_never_escapes() -> None:
    rng = np.random.default_rng(1)
    for name in PILLOW:
        whole = noisy(name)
        for _ in range(30):
            data = bytearray(whole)
            for at in rng.integers(0, min(len(data), 400), 4):
                data[at] = rng.integers(256)
            with contextlib.suppress(InvalidMedia, TooLarge):
                decode_image(bytes(data), PILLOW[name], height=64, width=64)


def test_bytes_of_another_format_than_planned() -> None:
    """Only the decoder of the planned type is tried."""
    with pytest.raises(InvalidMedia, match="the PNG picture is truncated or corrupt"):
        decode_image(noisy("JPEG"), "image/png", height=64, width=64)
    for media_type in ("image/svg+xml", "image/heic", "video/mp4", ""):
        with pytest.raises(InvalidMedia, match=r"accepted: image/avif, image/bmp, image/gif"):
            decode_image(noisy("PNG"), media_type, height=64, width=64)


def test_size_other_than_planned() -> None:
    data = save(scene((40, 24)), "PNG")
    with pytest.raises(InvalidMedia, match="40x24 pixels where 41x24 were planned"):
        decode_image(data, "image/png", height=24, width=41)
    with pytest.raises(InvalidMedia, match="40x24 pixels where 24x40 were planned"):
        decode_image(data, "image/png", height=40, width=24)


def test_a_bomb_is_refused_by_its_header() -> None:
    """A file of 1 KB that says 60000 x 60000: nothing of it is decoded."""
    data = bytearray(save(Image.new("L", (8, 8)), "PNG"))
    data[16:24] = struct.pack(">II", 60_000, 60_000)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    with pytest.raises(TooLarge):
        decode_image(bytes(data), "image/png", height=60_000, width=60_000)
    data[16:24] = struct.pack(">II", 4_000, 4_000)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    with pytest.raises(InvalidMedia, match="4000x4000 pixels where 8x8 were planned"):
        decode_image(bytes(data), "image/png", height=8, width=8)
