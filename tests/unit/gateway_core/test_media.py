"""Types by magic bytes, sizes by header, clips by packets, data URIs in every spelling."""

from __future__ import annotations

import base64
import contextlib
import io
import random

import pytest
from PIL import Image, ImageOps

from chiasm.errors import InvalidMedia, TooLarge
from chiasm.plan import Modality
from gateway.media.data_uri import is_data_uri, parse_data_uri
from gateway.media.header import MediaHeader, read_header
from tests.unit.gateway_core.clips import audio, clip
from tests.unit.gateway_core.conftest import png

RED = png()


def encoded(kind: str, size: tuple[int, int] = (40, 30), mode: str = "RGB", **options) -> bytes:
    file = io.BytesIO()
    Image.new(mode, size).save(file, kind, **options)
    return file.getvalue()


def header(
    data: bytes, modality: Modality = Modality.IMAGE, max_pixels: int = 10**8
) -> MediaHeader:
    return read_header(data, modality, max_pixels=max_pixels, param="p")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"])
def test_every_format_by_its_bytes(kind: str) -> None:
    found = header(encoded(kind))
    assert (found.height, found.width) == (30, 40)
    assert found.media_type == f"image/{kind.lower()}"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_what_a_decoder_makes_of_it(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(kind, exif=exif)
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        width, height = ImageOps.exif_transpose(image).size
    found = header(data)
    assert (found.height, found.width) == (height, width)
    assert (found.width == 30) == (orientation > 4)


def test_orientation_behind_the_pixels_of_a_png() -> None:
    """Chunk order is free: eXIf may follow IDAT, and nothing is decoded to find it."""
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded("PNG", exif=exif)
    begin = data.index(b"eXIf") - 4
    size = int.from_bytes(data[begin : begin + 4], "big") + 12
    chunk, rest = data[begin : begin + size], data[:begin] + data[begin + size :]
    end = rest.index(b"IEND") - 4
    found = header(rest[:end] + chunk + rest[end:])
    assert (found.height, found.width) == (40, 30)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<html><body>no</body></html>",
        b"<svg xmlns='http://www.w3.org/2000/svg'><image href='http://x/'/></svg>",
        b"just text that was renamed to png",
        b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic" + bytes(32),
        b"%PDF-1.7",
        b"\x89PNG\r\n\x1a\n",
        b"\xff\xd8\xff\xe0garbage",
    ],
)
def test_refused_pictures(data: bytes) -> None:
    with pytest.raises(InvalidMedia) as failure:
        header(data)
    assert failure.value.param == "p"
    if not data.startswith((b"\x89PNG", b"\xff\xd8")):
        assert "png" in failure.value.message  # lists what is accepted


def test_a_truncated_file_is_found_out_by_the_encoder_not_here() -> None:
    found = header(encoded("JPEG", (400, 300))[:-128])
    assert (found.height, found.width) == (300, 400)


def test_pixel_limit_is_ours_and_pillow_never_warns() -> None:
    data = bytearray(RED)
    data[16:24] = (30_000).to_bytes(4, "big") * 2
    data[29:33] = __import__("zlib").crc32(data[12:29]).to_bytes(4, "big")
    with pytest.raises(TooLarge):
        header(bytes(data))
    with pytest.raises(TooLarge):
        header(RED, max_pixels=56 * 56 - 1)
    assert header(RED, max_pixels=56 * 56)


def test_random_bytes_behind_every_magic_are_refused_in_order() -> None:
    noise = random.Random(0)
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"):
        good = encoded(kind)
        for _ in range(60):
            data = bytearray(good)
            for _ in range(noise.randint(1, 30)):
                data[noise.randrange(4, len(data))] = noise.randrange(256)
            with contextlib.suppress(InvalidMedia, TooLarge):
                header(bytes(data))


@pytest.mark.parametrize("frames", [1, 2, 3, 5, 17])
def test_clips_are_counted_by_packets(frames: int) -> None:
    found = header(clip(frames, fps=10), Modality.VIDEO)
    assert found.num_frames == frames
    assert (found.height, found.width) == (48, 64)
    assert found.frame_times_s == pytest.approx([i / 10 for i in range(frames)])
    assert found.duration_s == pytest.approx(frames / 10)
    assert found.media_type == "video/mp4"


@pytest.mark.parametrize(
    ("container", "codec"),
    [("mp4", "libx264"), ("webm", "libvpx-vp9"), ("avi", "mpeg4"), ("mpegts", "mpeg4")],
)
def test_a_clip_of_too_many_pixels_is_too_large(container: str, codec: str) -> None:
    """Whether or not FFmpeg still tells its size then."""
    data = clip(2, container=container, codec=codec)
    assert header(data, Modality.VIDEO, max_pixels=80 * 64).width == 64
    with pytest.raises(TooLarge, match="64x48 is more than 3071 pixels"):
        header(data, Modality.VIDEO, max_pixels=64 * 48 - 1)


def test_a_clip_that_does_not_tell_its_size_is_refused_with_the_limit() -> None:
    with pytest.raises(InvalidMedia, match="of at most 3071 pixels"):
        header(clip(2, codec="mpeg4"), Modality.VIDEO, max_pixels=64 * 48 - 1)


@pytest.mark.parametrize(("degrees", "size"), [(0, (48, 64)), (90, (64, 48)), (180, (48, 64))])
def test_display_rotation(degrees: int, size: tuple[int, int]) -> None:
    found = header(clip(4, rotation=degrees), Modality.VIDEO)
    assert (found.height, found.width) == size
    assert found.num_frames == 4


@pytest.mark.parametrize(
    ("container", "codec", "media_type"),
    [
        ("mov", "mpeg4", "video/quicktime"),
        ("matroska", "mpeg4", "video/x-matroska"),
        ("webm", "libvpx", "video/webm"),
        ("avi", "mpeg4", "video/x-msvideo"),
        ("mp4", "libx264", "video/mp4"),
        ("flv", "libx264", "video/x-flv"),
        ("mpeg", "mpeg2video", "video/mpeg"),
        ("mpegts", "mpeg2video", "video/mp2t"),
    ],
)
def test_containers(container: str, codec: str, media_type: str) -> None:
    found = header(clip(12, fps=25, container=container, codec=codec), Modality.VIDEO)
    assert found.media_type == media_type
    assert found.num_frames == 12
    assert found.duration_s == pytest.approx(12 / 25, abs=0.05)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<html></html>",
        RED,
        encoded("GIF"),
        audio("mp4"),
        b"ID3\x04" + bytes(64),
        b"0&\xb2u\x8ef\xcf\x11" + bytes(64),
        b"#EXTM3U\nhttp://127.0.0.1/x.ts",
        b"ffconcat version 1.0\nfile /etc/passwd",
        clip(5)[:200],
        b"\x1aE\xdf\xa3" + bytes(100),
        b"RIFF\x00\x00\x00\x00AVI " + bytes(100),
    ],
)
def test_no_video_stream(data: bytes) -> None:
    with pytest.raises(InvalidMedia, match="no decodable video stream"):
        header(data, Modality.VIDEO)


def test_pictures_and_clips_are_not_taken_for_each_other() -> None:
    with pytest.raises(InvalidMedia, match="image formats"):
        header(clip(3))


B64 = base64.b64encode(RED).decode()


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{B64}",
        f"data:;base64,{B64}",
        f"data:image;base64,{B64}",
        f"data:image/jpg;base64,{B64}",
        f"DATA:IMAGE/PNG;BASE64,{B64}",
        f"data:image/png;charset=x;base64,{B64}",
        f"data:image/png;base64, {B64}",
        f"  data:image/png;base64,{B64}\n",
        "data:image/png;base64," + "\n".join(B64[i : i + 76] for i in range(0, len(B64), 76)),
        f"data:image/png;base64,{base64.urlsafe_b64encode(RED).decode()}",
        f"data:image/png;base64,{B64.rstrip('=')}",
        f"data:image/png;base64,{B64.replace('+', '%2B').replace('/', '%2F').replace('=', '%3D')}",
        f"data:text/html;base64,{B64}",
    ],
)
def test_data_uri_spellings(url: str) -> None:
    assert is_data_uri(url)
    assert parse_data_uri(url, max_bytes=len(RED), param="p") == RED


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png,{B64}",
        "data:image/png;base64",
        "data:image/png;base64,",
        "data:image/png;base64,!!!!",
        "data:image/png;base64,A",
        "data:base64,AAAA",
        "data:",
        "data:image/png;base64,\u00e9\u00e9\u00e9\u00e9",
    ],
)
def test_bad_data_uris(url: str) -> None:
    assert is_data_uri(url)
    with pytest.raises(InvalidMedia):
        parse_data_uri(url, max_bytes=1000, param="p")


def test_data_uri_size() -> None:
    url = f"data:;base64,{base64.b64encode(bytes(3000)).decode()}"
    with pytest.raises(TooLarge):
        parse_data_uri(url, max_bytes=2999, param="p")
    assert len(parse_data_uri(url, max_bytes=3000, param="p")) == 3000
