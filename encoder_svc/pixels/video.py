"""Decodes the planned frames of a clip and nothing else, in display order.

Frame index i is the i-th displayed frame of the first real video stream: its packets' timestamps,
sorted. The same rule as the gateway's planning, so both mean the same picture.
"""

from __future__ import annotations

import bisect
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import av
from av.container import InputContainer
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from PIL import Image

from chiasm.errors import InvalidMedia, TooLarge
from chiasm.formats import VIDEO_FORMATS
from encoder_svc.pixels.image import MAX_SOURCE_PIXELS

_MAX_THREADS = 4
_TURNS = {
    90: Image.Transpose.ROTATE_90,
    180: Image.Transpose.ROTATE_180,
    270: Image.Transpose.ROTATE_270,
}
_NO_STREAM = "no decodable video stream"

# Containers with an index of keyframes. Elsewhere a seek may land anywhere: walk from the start.
_INDEXED = frozenset({"mov", "matroska", "flv"})
# AVI stores no display times, only an order of decoding: count what comes out of the decoder.
_UNTIMED = frozenset({"avi"})


@dataclass(frozen=True, slots=True)
class Timeline:
    """Timestamps of a stream's frames in display order, and where decoding may start.

    `timed` is False when timestamps do not tell frames apart: they are then counted from the start.
    """

    pts: tuple[int, ...]
    keys: tuple[int, ...]
    timed: bool
    indexed: bool

    def key_before(self, index: int) -> int:
        """Timestamp of the last keyframe at or before a frame."""
        at = bisect.bisect_right(self.keys, self.pts[index])
        return self.keys[at - 1] if at else self.pts[0]


def decode_frames(
    media: bytes, media_type: str, indices: Sequence[int], *, height: int, width: int
) -> Iterator[Image.Image | None]:
    """Yields one RGB picture per index of `indices` (ascending, the last may repeat).

    None stands for a frame that the data does not hold. Frames before a wanted one are decoded only
    from the keyframe it needs; nothing after the last wanted one is.

    Args:
        media: The file's bytes.
        media_type: By magic bytes; selects the only demuxer that is tried.
        indices: Frames in display order, counted from 0.
        height: Of a displayed frame as planned; another size in the header is refused.
        width: Likewise.

    Raises:
        InvalidMedia: No video stream, or a container that cannot be read.
        TooLarge: Frames of more than MAX_SOURCE_PIXELS.
    """
    demuxer = VIDEO_FORMATS.get(media_type)
    if demuxer is None:
        raise InvalidMedia(f"{_NO_STREAM} in a file of type {media_type or 'unknown'}")
    decoder: _Decoder | None = None
    try:
        with av.open(io.BytesIO(media), mode="r", format=demuxer) as container:
            stream = _video_stream(container)
            _check_header(stream, height=height, width=width)
            timeline = _read_timeline(container, stream, demuxer)
        if not timeline.pts:
            raise InvalidMedia(_NO_STREAM)
        decoder = _Decoder(media, demuxer, timeline)
        yield from _pick(decoder, indices)
    except (av.FFmpegError, ValueError) as error:
        raise InvalidMedia(f"{_NO_STREAM}: the {demuxer} container cannot be read") from error
    finally:
        if decoder is not None:
            decoder.close()


def _pick(decoder: _Decoder, indices: Sequence[int]) -> Iterator[Image.Image | None]:
    previous = -1
    picture: Image.Image | None = None
    for index in indices:
        if index != previous:
            frame = decoder.frame(index)
            picture = None if frame is None else _to_picture(frame)
            previous = index
        yield picture


def _video_stream(container: InputContainer) -> VideoStream:
    for stream in container.streams.video:
        attached = stream.disposition & Disposition.attached_pic
        if not attached and stream.codec_context is not None:
            return stream
    raise InvalidMedia(_NO_STREAM)


def _check_header(stream: VideoStream, *, height: int, width: int) -> None:
    size = (stream.codec_context.height, stream.codec_context.width)
    if size[0] * size[1] > MAX_SOURCE_PIXELS:
        raise TooLarge(f"frames of {size[1]}x{size[0]} pixels are too large")
    if min(size) > 0 and sorted(size) != sorted((height, width)):
        raise InvalidMedia(
            f"the clip is {size[1]}x{size[0]} pixels where {width}x{height} were planned"
        )


def _read_timeline(container: InputContainer, stream: VideoStream, demuxer: str) -> Timeline:
    """Demuxes the whole file and decodes nothing."""
    stamps: list[int] = []
    keys: list[int] = []
    timed = demuxer not in _UNTIMED
    for packet in container.demux(stream):
        if packet.size == 0 or packet.is_discard:
            continue
        timed = timed and packet.pts is not None
        stamp = packet.pts if packet.pts is not None else packet.dts
        if stamp is None:
            continue
        stamps.append(stamp)
        if packet.is_keyframe:
            keys.append(stamp)
    stamps.sort()
    keys.sort()
    distinct = len(set(stamps)) == len(stamps)
    return Timeline(tuple(stamps), tuple(keys), timed and distinct, demuxer in _INDEXED)


class _Decoder:
    """A forward-only cursor over decoded frames that skips ahead by keyframes.

    Broken packets are skipped; a frame that the decoder marks corrupt counts as not there.
    """

    def __init__(self, media: bytes, demuxer: str, timeline: Timeline) -> None:
        self._media = media
        self._demuxer = demuxer
        self._timeline = timeline
        self._may_seek = timeline.timed and timeline.indexed
        self._counted = 0  # frames that came out, where there are no timestamps
        self._container: InputContainer | None = None
        self._restart()

    def frame(self, index: int) -> VideoFrame | None:
        """The frame at `index`, or None when the data does not hold it. Indices must ascend."""
        if index >= len(self._timeline.pts):
            return None
        if not self._timeline.timed:
            return self._count_to(index)
        wanted = self._timeline.pts[index]
        key = self._timeline.key_before(index)
        if not self._may_seek or key <= self._at:
            return self._scan(wanted)
        self._skip_to(key)
        frame = self._scan(wanted)
        if frame is None and self._ahead is not None and self._at == key:
            # The demuxer landed behind the keyframe: walk from the start, and never seek again.
            self._may_seek = False
            self._restart()
            frame = self._scan(wanted)
        return frame

    def close(self) -> None:
        """Frees the decoder and its frames."""
        if self._container is not None:
            self._container.close()
            self._container = None

    def _restart(self) -> None:
        """Opens the file anew: not every demuxer can seek back to its first packet."""
        self.close()
        container = av.open(io.BytesIO(self._media), mode="r", format=self._demuxer)
        self._container = container
        self._stream = _video_stream(container)
        self._stream.thread_type = "AUTO"
        self._stream.codec_context.thread_count = min(_MAX_THREADS, os.cpu_count() or 1)
        self._begin(self._timeline.pts[0])

    def _skip_to(self, key: int) -> None:
        assert self._container is not None
        self._container.seek(key, stream=self._stream)
        self._stream.codec_context.flush_buffers()
        self._begin(key)

    def _begin(self, stamp: int) -> None:
        self._at = stamp  # timestamp decoding has come to
        self._ahead: VideoFrame | None = None  # decoded one too far: the next to be looked at
        self._frames = self._decode()

    def _scan(self, wanted: int) -> VideoFrame | None:
        """Decodes up to a timestamp; a frame beyond it is kept for later."""
        while (frame := self._next()) is not None:
            if frame.pts is None:
                continue
            if frame.pts > wanted:
                self._ahead = frame
                return None
            self._at = max(self._at, frame.pts)
            if frame.pts == wanted:
                return None if frame.is_corrupt else frame
        return None

    def _count_to(self, index: int) -> VideoFrame | None:
        """Without timestamps: the index-th frame that comes out of the decoder."""
        while (frame := self._next()) is not None:
            self._counted += 1
            if self._counted > index:
                return None if frame.is_corrupt else frame
        return None

    def _next(self) -> VideoFrame | None:
        if (frame := self._ahead) is not None:
            self._ahead = None
            return frame
        return next(self._frames, None)

    def _decode(self) -> Iterator[VideoFrame]:
        assert self._container is not None
        packets = self._container.demux(self._stream)
        while True:
            try:
                packet = next(packets, None)
            except av.FFmpegError:
                packet = None  # the file ends in rubble
            if packet is None:
                return
            try:
                yield from packet.decode()
            except av.FFmpegError:
                continue  # this packet is lost; later ones may decode


def _to_picture(frame: VideoFrame) -> Image.Image:
    if frame.width * frame.height > MAX_SOURCE_PIXELS:
        raise TooLarge(f"a frame of {frame.width}x{frame.height} pixels is too large")
    picture: Image.Image = frame.to_image()
    turn = _TURNS.get(round(frame.rotation) % 360)
    return picture if turn is None else picture.transpose(turn)
