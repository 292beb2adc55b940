"""Small files that would cost much are refused at once; what programs write is not."""

from __future__ import annotations

import io
import struct
import time
import zlib

import av
import pytest
from PIL import Image

from chiasm.errors import InvalidMedia, TooLarge
from chiasm.plan import Modality
from gateway.media import video
from gateway.media.header import MediaHeader, read_header
from tests.unit.gateway_core.clips import clip

_STBL = (b"moov", b"trak", b"mdia", b"minf", b"stbl")


def header(data: bytes, modality: Modality, max_pixels: int = 10**8) -> MediaHeader:
    return read_header(data, modality, max_pixels=max_pixels, param="p")


def refused(data: bytes, modality: Modality, word: str) -> None:
    began = time.thread_time()  # of ours: not what others are given meanwhile
    with pytest.raises(InvalidMedia, match=word) as caught:
        header(data, modality)
    assert caught.value.param == "p"
    assert time.thread_time() - began < 1


def picture(kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    Image.new("L", (64, 48), 128).save(file, kind, **options)
    return file.getvalue()


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def boxes(data: bytes) -> list[tuple[bytes, bytes]]:
    found, at = [], 0
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        found.append((kind, data[at + 8 : at + size]))
        at += size
    return found


def box(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(body), kind) + body


def replaced(data: bytes, path: tuple[bytes, ...], body: bytes) -> bytes:
    """The file with the body of the box at `path` exchanged."""
    if not path:
        return body
    return b"".join(
        box(kind, replaced(inner, path[1:], body) if kind == path[0] else inner)
        for kind, inner in boxes(data)
    )


def fragmented() -> bytes:
    file = io.BytesIO()
    flags = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
    with (
        av.open(io.BytesIO(clip(8))) as source,
        av.open(file, "w", format="mp4", options=flags) as copy,
    ):
        stream = copy.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                copy.mux(packet)
    return file.getvalue()


@pytest.mark.parametrize("before_pixels", [True, False])
def test_a_png_of_nothing_but_chunks(before_pixels: bool) -> None:
    data = picture("PNG")
    at = 33 if before_pixels else len(data) - 12
    few, many = (data[:at] + chunk(b"abCd") * n + data[at:] for n in (1000, 70_000))
    assert header(few, Modality.IMAGE).width == 64
    refused(many, Modality.IMAGE, "chunks")


@pytest.mark.parametrize("filler", [b"\xff\xfe\0\2", b"\xff"], ids=["comments", "fill bytes"])
def test_a_jpeg_of_nothing_but_segments(filler: bytes) -> None:
    data = picture("JPEG")
    few, many = (data[:2] + filler * n + data[2:] for n in (1000, 70_000))
    assert header(few, Modality.IMAGE).width == 64
    refused(many, Modality.IMAGE, "segments")


def test_a_jpeg_of_a_thousand_scans() -> None:
    data = picture("JPEG", progressive=True)
    last, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    few, many = (data[:end] + data[last:end] * n + data[end:] for n in (50, 1000))
    assert header(few, Modality.IMAGE).width == 64
    refused(many, Modality.IMAGE, "scans")
    behind = data + data[last:end] * 1000  # a film behind a photograph is nobody's scan
    assert header(behind, Modality.IMAGE).width == 64


def test_nothing_reads_a_second_scan_of_a_sequential_jpeg() -> None:
    """So none is looked for: the first has all components, and libjpeg refuses what follows."""
    data = picture("JPEG")
    last, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    many = data[:end] + data[last:end] * 1000 + data[end:]
    assert header(many, Modality.IMAGE).width == 64
    with pytest.raises(OSError, match="broken"), Image.open(io.BytesIO(many)) as image:
        image.load()


def test_scans_of_single_components_are_counted() -> None:
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "JPEG")
    data = file.getvalue()
    at = data.index(b"\xff\xda")
    parts = data[:at] + b"\xff\xda\0\x08\1\1\0\0?\0" * 1000 + data[at:]
    refused(parts, Modality.IMAGE, "scans")


@pytest.mark.parametrize("filler", [b"!\xfe\1a\0", b"\0"], ids=["comments", "junk"])
def test_a_gif_of_nothing_but_blocks(filler: bytes) -> None:
    data = picture("GIF")
    at = data.index(b",", 13 + (3 << (data[10] & 7) + 1))
    few, many = (data[:at] + filler * n + data[at:] for n in (1000, 70_000))
    assert header(few, Modality.IMAGE).width == 64
    refused(many, Modality.IMAGE, "blocks")


@pytest.mark.parametrize("name", ["stsz", "stz2", "trun"])
def test_a_clip_that_claims_millions_of_samples(name: str) -> None:
    count = 50_000_000
    data = clip(8)
    if name == "stsz":
        data = replaced(data, (*_STBL, b"stsz"), struct.pack(">III", 0, 1, count))
    elif name == "stz2":
        data = replaced(data, (*_STBL, b"stss"), b"")
        data = data.replace(b"stss", b"stz2")
        data = replaced(data, (*_STBL, b"stz2"), struct.pack(">III", 0, 4, count))
    else:
        data = replaced(fragmented(), (b"moof", b"traf", b"trun"), struct.pack(">III", 1, count, 0))
    refused(data, Modality.VIDEO, "samples")


def test_a_clip_whose_header_is_compressed() -> None:
    parts = dict(boxes(clip(8)))
    packed = box(b"cmov", box(b"dcom", b"zlib") + box(b"cmvd", zlib.compress(parts.pop(b"moov"))))
    rest = b"".join(box(kind, body) for kind, body in parts.items())
    refused(rest + box(b"moov", packed), Modality.VIDEO, "compressed header")


def test_a_clip_of_nothing_but_boxes() -> None:
    refused(clip(2) + box(b"abcd", b"") * 270_000, Modality.VIDEO, "boxes")


def test_fragments_are_a_clip_like_any() -> None:
    assert header(fragmented(), Modality.VIDEO).num_frames == 8


@pytest.mark.parametrize(
    ("codec", "verdict"), [("libx264", TooLarge), ("mpeg4", InvalidMedia)], ids=str
)
def test_no_frame_beyond_the_limit_is_decoded(
    codec: str, verdict: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by us nor while FFmpeg probes."""
    data = clip(2, codec=codec)
    assert header(data, Modality.VIDEO, max_pixels=64 * 48).num_frames == 2
    decoded: list[object] = []
    turns = video._Turns.look
    monkeypatch.setattr(
        video._Turns,
        "look",
        lambda self, packet: (turns(self, packet), decoded.append(self._packets_left)),
    )
    with pytest.raises(verdict, match="pixels"):
        header(data, Modality.VIDEO, max_pixels=64 * 48 - 1)
    assert decoded and 0 not in decoded  # 0 is said by the first frame
