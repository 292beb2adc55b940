"""Writes and reads short mp4 files, and samples their frames as the family's processor does."""

from __future__ import annotations

import io
from collections.abc import Sequence

import av
from PIL import Image

from tools.demo_model import spec

FILE_FPS = 8
MIN_FRAMES = 4


def encode_mp4(frames: Sequence[Image.Image], *, fps: int = FILE_FPS) -> bytes:
    """Encode frames of one even size as H.264."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fps, options={"crf": "20"})
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())
    return buffer.getvalue()


def decode_mp4(content: bytes) -> tuple[list[Image.Image], float]:
    """Decode all frames; the second value is the file's frame rate."""
    with av.open(io.BytesIO(content)) as container:
        rate = container.streams.video[0].average_rate
        return [frame.to_image() for frame in container.decode(video=0)], float(rate or FILE_FPS)


def sample_frames(frames: Sequence[Image.Image], fps: float) -> tuple[list[Image.Image], float]:
    """Choose an even number of frames, two a second; the second value is seconds per grid frame."""
    wanted = min(max(len(frames) / fps * spec.FPS, MIN_FRAMES), len(frames))
    count = int(wanted // spec.TEMPORAL_PATCH) * spec.TEMPORAL_PATCH
    step = len(frames) / count
    chosen = [frames[int(index * step)] for index in range(count)]
    sampled_fps = count / (len(frames) / fps)
    return chosen, spec.TEMPORAL_PATCH / sampled_fps
