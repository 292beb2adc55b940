"""Clips whose frames tell their number: frame i is grey of level 10 + 6i."""

from __future__ import annotations

import io
from collections.abc import Sequence

import av
import numpy as np
from PIL import Image

HEIGHT, WIDTH = 48, 64


def level(index: int) -> int:
    return 10 + 6 * index


def number(picture: Image.Image | np.ndarray) -> int:
    """Which frame a decoded picture shows."""
    return round((float(np.asarray(picture).mean()) - 10) / 6)


def clip(
    frames: int,
    *,
    container: str = "mp4",
    codec: str = "libx264",
    gop: int = 12,
    b_frames: int = 0,
    still: Sequence[np.ndarray] | None = None,
) -> bytes:
    """A clip of `frames` frames at 10 frames/s; `still` gives other pictures than the levels."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        if codec == "libx264":
            stream.options = {"preset": "ultrafast", "bf": str(b_frames), "crf": "8"}
        stream.codec_context.gop_size = gop
        if codec == "mpeg4":
            stream.codec_context.qmax = 3
        for index in range(frames):
            if still is not None:
                plane = still[index]
            else:
                plane = np.full((HEIGHT, WIDTH, 3), level(index), dtype=np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(plane)):
                output.mux(packet)
        for packet in stream.encode(None):
            output.mux(packet)
    return buffer.getvalue()


def sound(container: str = "mp4") -> bytes:
    """A second of silence and no picture."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream = output.add_stream("aac", rate=8000)
        for index in range(8):
            frame = av.AudioFrame.from_ndarray(
                np.zeros((1, 1024), dtype=np.float32), format="fltp", layout="mono"
            )
            frame.sample_rate, frame.pts = 8000, index * 1024
            for packet in stream.encode(frame):
                output.mux(packet)
        for packet in stream.encode(None):
            output.mux(packet)
    return buffer.getvalue()
