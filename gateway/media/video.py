"""Demuxes a clip: the time of every frame from packet timestamps, because headers lie about counts.

Only the first frame is decoded, for its rotation. Opens only the demuxer that the magic bytes name.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass

import av
from av.container import InputContainer
from av.packet import Packet
from av.stream import Disposition
from av.video.stream import VideoStream

from chiasm.errors import InvalidMedia, TooLarge
from chiasm.formats import VIDEO_FORMATS

_NO_VIDEO = "no decodable video stream"
_NO_CODEC = "none"  # of that name
_MAX_FRAMES = 4_000_000  # 18 hours at 60 frames/s
_PACKETS_TO_FIRST_FRAME = 64


@dataclass(frozen=True, slots=True)
class Clip:
    """A clip's displayed size and the time of each frame, in display order, the first at 0."""

    height: int
    width: int
    frame_times_s: tuple[float, ...]
    duration_s: float


def read_video(data: bytes, media_type: str, *, max_pixels: int, param: str) -> Clip:
    """Reads every packet's timestamp; no frame of more than `max_pixels` is decoded.

    Raises:
        InvalidMedia: No video stream with a known codec, or no packet in it. Cover art is no video.
        TooLarge: Its container says that frames have more pixels.
    """
    limits = {"max_pixels": str(max_pixels)}  # FFmpeg decodes while it probes, too
    try:
        with av.open(
            io.BytesIO(data), format=VIDEO_FORMATS[media_type], options=limits
        ) as container:
            assert isinstance(container, InputContainer), "opened for reading"
            stream = _pick(container)
            if stream is None:
                raise InvalidMedia(_NO_VIDEO, param=param)
            stream.codec_context.options = limits
            turns = _Turns(stream)
            times, last_s = _frame_times(container, stream, turns)
            sides = stream.codec_context.height, stream.codec_context.width
    except (av.FFmpegError, ValueError, OverflowError):
        raise InvalidMedia(f"{_NO_VIDEO}: the container cannot be read", param=param) from None
    if not times:
        raise InvalidMedia(_NO_VIDEO, param=param)
    if min(sides) < 1:  # also what FFmpeg says of a size beyond the limit
        height, width = _claimed_sides(data, media_type)
        if height * width > max_pixels:
            raise TooLarge(f"{width}x{height} is more than {max_pixels} pixels", param=param)
        raise InvalidMedia(f"{_NO_VIDEO} of at most {max_pixels} pixels", param=param)
    height, width = reversed(sides) if turns.quarter else sides
    return Clip(height, width, tuple(times), times[-1] + last_s)


def _claimed_sides(data: bytes, media_type: str) -> tuple[int, int]:
    """Height and width by the container, where it says so (MPEG-4 Part 2 in MP4 does not), else 0.

    No codec is opened, so that no frame is decoded, however large.
    """
    try:
        with av.open(
            io.BytesIO(data),
            format=VIDEO_FORMATS[media_type],
            options={"codec_whitelist": _NO_CODEC},
        ) as container:
            assert isinstance(container, InputContainer), "opened for reading"
            stream = _pick(container)
            if stream is None:
                return 0, 0
            return stream.codec_context.height, stream.codec_context.width
    except (av.FFmpegError, ValueError, OverflowError):
        return 0, 0


class _Turns:
    """Whether frames are shown turned by 90 degrees. Says so only once a frame was decoded."""

    def __init__(self, stream: VideoStream) -> None:
        self.quarter = False
        self._context = stream.codec_context
        self._context.thread_count = 1
        self._packets_left = _PACKETS_TO_FIRST_FRAME

    def look(self, packet: Packet[VideoStream]) -> None:
        """Decodes until the first frame has come, then never again."""
        if not self._packets_left:
            return
        self._packets_left -= 1
        try:
            for frame in packet.decode():
                self.quarter = round(frame.rotation) % 180 == 90
                self._packets_left = 0
        except av.FFmpegError:
            pass  # a broken first packet: the encoder finds out and judges


def _pick(container: InputContainer) -> VideoStream | None:
    for stream in container.streams.video:
        if not stream.disposition & Disposition.attached_pic and stream.codec_context is not None:
            return stream
    return None


def _frame_times(
    container: InputContainer, stream: VideoStream, turns: _Turns
) -> tuple[list[float], float]:
    """Times in display order from 0, and how long the last frame stays, in seconds."""
    base = float(stream.time_base) if stream.time_base else 0.0
    ticks: list[int] = []
    last_ticks = 0
    for packet in container.demux(stream):
        if packet.size == 0 or packet.is_discard or len(ticks) >= _MAX_FRAMES:
            continue
        turns.look(packet)
        last_ticks = packet.duration or last_ticks
        stamp = packet.pts if packet.pts is not None else packet.dts
        if stamp is not None:
            ticks.append(stamp)
    ticks.sort()
    if not ticks:
        return [], 0.0
    times = [(tick - ticks[0]) * base for tick in ticks]
    if len(ticks) > 1 and times[-1] > 0:
        return times, times[-1] / (len(times) - 1)
    rate = float(stream.average_rate or 0)
    return times, last_ticks * base or (1 / rate if rate and math.isfinite(rate) else 0.0)
