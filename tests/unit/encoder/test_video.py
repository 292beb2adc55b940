"""Frames of a clip: which are decoded, and what happens to clips that lack some."""

from __future__ import annotations

import io
import struct
import threading

import av
import numpy as np
import pytest
from av.stream import Disposition
from PIL import Image

from chiasm.errors import Cancelled, InvalidMedia
from chiasm.plan import Span
from encoder_svc.geometry import Geometry, resolve_run
from encoder_svc.messages import EncodeJob
from encoder_svc.pixels import video
from encoder_svc.pixels.settings import PixelSettings
from encoder_svc.pixels.video import decode_frames
from encoder_svc.processor import Processor
from encoder_svc.work import PreparedUnit
from tests.unit.encoder.clips import HEIGHT, WIDTH, clip, level, number, sound
from tests.unit.encoder.plans import image_plan, job, video_plan

GEOMETRY = Geometry(patch=14, temporal_patch=2, merge=2)
KINDS = {
    "h264 mp4": ("video/mp4", {}),
    "h264 mp4 with B frames": ("video/mp4", {"b_frames": 2}),
    "mpeg4 mp4": ("video/mp4", {"codec": "mpeg4"}),
    "h264 matroska with B frames": ("video/x-matroska", {"container": "matroska", "b_frames": 2}),
    "vp9 webm": ("video/webm", {"container": "webm", "codec": "libvpx-vp9"}),
    "mpeg4 avi": ("video/x-msvideo", {"container": "avi", "codec": "mpeg4"}),
    "h264 avi with B frames": ("video/x-msvideo", {"container": "avi", "b_frames": 2}),
    "h264 transport stream": ("video/mp2t", {"container": "mpegts", "b_frames": 2}),
    "mpeg2 program stream": ("video/mpeg", {"container": "mpeg", "codec": "mpeg2video"}),
    "h264 flv": ("video/x-flv", {"container": "flv", "b_frames": 2}),
}


def decode(
    data: bytes, indices: tuple[int, ...], media_type: str = "video/mp4"
) -> list[int | None]:
    frames = decode_frames(data, media_type, indices, height=HEIGHT, width=WIDTH)
    return [None if frame is None else number(frame) for frame in frames]


@pytest.mark.parametrize("kind", KINDS)
def test_index_means_the_displayed_frame(kind: str) -> None:
    media_type, options = KINDS[kind]
    data = clip(40, **options)
    for indices in (tuple(range(40)), (0, 5, 13, 26, 39, 39), (30, 31), (39,), (3, 37)):
        assert decode(data, indices, media_type) == list(indices)


def test_only_what_planned_frames_need_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between planned frames the decoder jumps to the keyframe each needs, and it stops."""
    data = clip(40, gop=4)
    decoded = 0
    real = video._Decoder._next

    def count(self: video._Decoder) -> object:
        nonlocal decoded
        decoded += 1
        return real(self)

    monkeypatch.setattr(video._Decoder, "_next", count)
    assert decode(data, (0, 21, 33)) == [0, 21, 33]
    assert decoded == 1 + 2 + 2
    decoded = 0
    assert decode(data, (5, 6, 7)) == [5, 6, 7]
    assert decoded == 4


def test_a_turned_clip_is_turned() -> None:
    """A phone's display matrix: the plan has the turned size."""
    still = np.zeros((HEIGHT, WIDTH, 3), dtype=np.uint8)
    still[:, : WIDTH // 2] = 250
    data = bytearray(clip(2, still=[still, still]))
    matrix = data.index(b"tkhd") + 44
    struct.pack_into(">9i", data, matrix, 0, 65536, 0, -65536, 0, 0, 0, 0, 1 << 30)
    (frame,) = decode_frames(bytes(data), "video/mp4", (0,), height=WIDTH, width=HEIGHT)
    assert frame is not None and frame.size == (HEIGHT, WIDTH)
    pixels = np.asarray(frame)
    assert pixels[: WIDTH // 2 - 2].mean() > 240 and pixels[WIDTH // 2 + 2 :].mean() < 10


def cover_art() -> bytes:
    """A sound file with a picture attached."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as output:
        audio = output.add_stream("aac", rate=8000)
        cover = output.add_stream("mjpeg", rate=1)
        cover.width = cover.height = 32
        cover.pix_fmt = "yuvj420p"
        cover.disposition = Disposition.attached_pic
        picture = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), dtype=np.uint8))
        for packet in cover.encode(picture):
            output.mux(packet)
        samples = np.zeros((1, 1024), dtype=np.float32)
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
        frame.sample_rate = 8000
        for packet in (*audio.encode(frame), *audio.encode(None)):
            output.mux(packet)
    return buffer.getvalue()


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (WIDTH, HEIGHT)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "media_type"),
    [
        (sound(), "video/mp4"),
        (cover_art(), "video/mp4"),
        (b"", "video/mp4"),
        (b"<html>not found</html>", "video/mp4"),
        (png(), "video/mp4"),
        (png(), "image/png"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "application/vnd.apple.mpegurl"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "video/mp2t"),
    ],
    ids=["sound", "cover art", "empty", "html", "png", "png by type", "playlist", "playlist as ts"],
)
def test_no_video_stream(data: bytes, media_type: str) -> None:
    """Whatever is in the file instead of a clip, the refusal begins with the same words."""
    with pytest.raises(InvalidMedia, match="^no decodable video stream"):
        decode(data, (0,), media_type)


def test_size_other_than_planned() -> None:
    with pytest.raises(InvalidMedia, match="64x48 pixels where 64x50 were planned"):
        list(decode_frames(clip(2), "video/mp4", (0,), height=50, width=64))


# The processor


def prepare(
    data: bytes,
    indices: tuple[int, ...],
    *,
    frames: Span | None = None,
    cancelled: threading.Event | None = None,
) -> list[PreparedUnit]:
    work = job(video_plan(HEIGHT, WIDTH, indices), data, frames=frames)
    return list(run(work, cancelled=cancelled or threading.Event()))


def run(work: EncodeJob, *, cancelled: threading.Event) -> list[PreparedUnit]:
    settings = PixelSettings(GEOMETRY, mean=(0.0,) * 3, std=(1.0,) * 3)
    units = resolve_run(GEOMETRY, work.plan, work.frames, work.rows).units()
    return list(Processor(settings, settings).prepare(work, units, cancelled))


def shown(units: list[PreparedUnit]) -> list[int]:
    """Frame numbers in order, from the patches."""
    found = []
    for unit in units:
        cells = unit.patches.reshape(unit.grid.t, -1, 3, 2, 14, 14).mean(axis=(1, 2, 4, 5))
        found += [round((float(value) * 255 - 10) / 6) for value in cells.flatten()]
    return found


@pytest.mark.parametrize("count", [1, 2, 3, 5, 17])
def test_odd_counts_repeat_the_last_frame(count: int) -> None:
    """One frame is a whole temporal patch."""
    (unit,) = prepare(clip(count), tuple(range(count)))
    assert unit.grid.t == -(-count // 2) and unit.substituted_frames == 0
    assert shown([unit]) == [*range(count), *([count - 1] * (count % 2))]


def test_units_and_runs_yield_the_rows_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    data, indices = clip(12, b_frames=2), tuple(range(12))
    (whole,) = prepare(data, indices)
    monkeypatch.setattr("chiasm.runs.UNIT_PATCHES", 2 * 4)
    units = prepare(data, indices)
    assert [unit.grid.t for unit in units] == [2, 2, 2]
    assert np.array_equal(np.concatenate([unit.patches for unit in units]), whole.patches)
    parts = prepare(data, indices, frames=Span(4, 12))
    assert [unit.grid.t for unit in parts] == [2, 2]
    assert np.array_equal(np.concatenate([p.patches for p in parts]), whole.patches[2 * 4 :])


def test_a_plan_for_more_frames_than_the_data_holds() -> None:
    """Up to a quarter is filled up with the last good frame; more is refused."""
    (unit,) = prepare(clip(12), tuple(range(16)))
    assert shown([unit]) == [*range(12), 11, 11, 11, 11] and unit.substituted_frames == 4
    with pytest.raises(InvalidMedia, match="more than a quarter of the clip's frames"):
        prepare(clip(12), tuple(range(18)))


def test_a_hole_in_the_middle() -> None:
    """Zeroed bytes cost a few frames, or the clip; never an assertion, never a hang."""
    rng = np.random.default_rng(3)
    noise = [rng.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8) for _ in range(40)]
    data = bytearray(clip(40, still=noise, gop=2))
    assert len(data) > 40_000
    middle = len(data) // 2
    data[middle : middle + 4096] = bytes(4096)
    (unit,) = prepare(bytes(data), tuple(range(40)))
    assert unit.grid.t == 20 and unit.substituted_frames <= 10
    data[len(data) // 10 : -4096] = bytes(len(data) - 4096 - len(data) // 10)
    with pytest.raises(InvalidMedia):
        prepare(bytes(data), tuple(range(40)))


def test_lost_first_frames_take_the_first_good_one(monkeypatch: pytest.MonkeyPatch) -> None:
    grey = [Image.new("RGB", (WIDTH, HEIGHT), (level(i),) * 3) for i in range(8)]
    monkeypatch.setattr(
        "encoder_svc.processor.decode_frames",
        lambda *args, **kwargs: iter([None, None, *grey[2:]]),
    )
    (unit,) = prepare(b"", tuple(range(8)))
    assert shown([unit]) == [2, 2, 2, 3, 4, 5, 6, 7] and unit.substituted_frames == 2


def test_a_run_repeats_the_good_frame_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an encode of the whole clip does: where a clip is cut shows in no row."""
    grey = [Image.new("RGB", (WIDTH, HEIGHT), (level(i),) * 3) for i in range(24)]
    lost = {2, 3, 4, 5}
    asked: list[list[int]] = []

    def decode_some(media: bytes, media_type: str, indices: list[int], **size: int) -> object:
        asked.append(list(indices))
        return iter([None if index in lost else grey[index] for index in indices])

    monkeypatch.setattr("encoder_svc.processor.decode_frames", decode_some)
    monkeypatch.setattr("chiasm.runs.UNIT_PATCHES", 2 * 4)
    whole = prepare(b"", tuple(range(24)))
    assert shown(whole[:2]) == [0, 1, 1, 1, 1, 1, 6, 7]
    parts = prepare(b"", tuple(range(24)), frames=Span(4, 24))
    assert shown(parts) == shown(whole[1:]) and parts[0].substituted_frames == 2
    assert asked[1:] == [list(range(4, 24)), [0, 1, 2, 3]]
    lost.update((0, 1))
    parts = prepare(b"", tuple(range(24)), frames=Span(4, 24))
    assert shown(parts[:1]) == [6, 6, 6, 7]


def test_cancelling_stops_between_frames() -> None:
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(Cancelled):
        prepare(clip(4), (0, 1, 2, 3), cancelled=cancelled)


def test_a_still_picture_is_no_clip_and_the_other_way_round() -> None:
    with pytest.raises(InvalidMedia, match="no decodable video stream"):
        plan = video_plan(HEIGHT, WIDTH, (0,), media_type="image/png")
        run(job(plan, png()), cancelled=threading.Event())
    with pytest.raises(InvalidMedia, match="video/mp4 is no picture"):
        plan = image_plan(HEIGHT, WIDTH, media_type="video/mp4")
        run(job(plan, clip(2)), cancelled=threading.Event())
