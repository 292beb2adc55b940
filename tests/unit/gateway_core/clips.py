"""Small clips, made with PyAV."""

from __future__ import annotations

import io
from fractions import Fraction

import av
import numpy as np


def clip(
    frames: int,
    *,
    fps: int | Fraction = 10,
    size: tuple[int, int] = (64, 48),
    container: str = "mp4",
    codec: str = "mpeg4",
    rotation: int = 0,
) -> bytes:
    """A clip of `frames` frames of `size` (width, height), each of another grey, shown turned."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        if rotation:
            stream.set_display_rotation(rotation)
        for index in range(frames):
            grey = np.full((size[1], size[0], 3), 16 + index * 3 % 220, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")):
                output.mux(packet)
        for packet in stream.encode():
            output.mux(packet)
    return file.getvalue()


def audio(container: str = "mp4", codec: str = "aac") -> bytes:
    """A second of silence, no picture."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=44100)
        frame = av.AudioFrame.from_ndarray(
            np.zeros((2, 1024), np.float32), format="fltp", layout="stereo"
        )
        frame.sample_rate = 44100
        for _ in range(40):
            for packet in stream.encode(frame):
                output.mux(packet)
        for packet in stream.encode():
            output.mux(packet)
    return file.getvalue()
