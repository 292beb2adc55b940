"""Pictures and clips for measuring: like photographs, and no file twice."""

from __future__ import annotations

import base64
import io
import itertools
import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np

from bench.encoder_load import jpeg, picture

_SOI = 2  # bytes of a JPEG's first marker
FULL_HD, SQUARE = (1080, 1920), (1120, 1120)


class Album:
    """JPEG files of one size. Each has a serial number in a comment: the same pixels, other bytes.

    Args:
        size: Height and width.
        count: Different pictures.
    """

    def __init__(self, size: tuple[int, int], *, count: int = 4) -> None:
        self._files = [jpeg(picture(*size, seed=seed)) for seed in range(count)]
        self._name = secrets.token_hex(8)
        self._serials = itertools.count()

    def fresh(self) -> dict[str, Any]:
        """A part of a message: a picture that nobody has seen."""
        serial = next(self._serials)
        return part(_with_comment(self._files[serial % len(self._files)], f"{self._name} {serial}"))

    def popular(self, count: int) -> list[dict[str, Any]]:
        """So many pictures, to be shown again and again."""
        return [self.fresh() for _ in range(count)]


def part(data: bytes, kind: str = "image", media_type: str = "image/jpeg") -> dict[str, Any]:
    """A part of a message that carries a file."""
    url = f"data:{media_type};base64,{base64.b64encode(data).decode('ascii')}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def text(tokens: int) -> dict[str, Any]:
    """So many tokens of text: every digit is one. Never the same twice."""
    digits = "".join(secrets.choice("0123456789") for _ in range(tokens))
    return {"type": "text", "text": digits}


def clip(seconds: float, *, rate: int = 30, group: int = 250) -> bytes:
    """H.264 of 1280 x 720 in MP4, `group` frames from one key frame to the next."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 1280, 720, "yuv420p"
        stream.codec_context.gop_size = group
        stream.options = {"preset": "veryfast", "sc_threshold": "0"}
        for pixels in _frames(round(seconds * rate)):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def _frames(count: int) -> Iterator[np.ndarray[Any, Any]]:
    """A window that moves over a large picture."""
    large = np.asarray(picture(1080, 1920, seed=7))
    for index in range(count):
        top, left = index % 360, (2 * index) % 640
        yield np.ascontiguousarray(large[top : top + 720, left : left + 1280])


def _with_comment(data: bytes, words: str) -> bytes:
    body = words.encode()
    return data[:_SOI] + b"\xff\xfe" + (len(body) + 2).to_bytes(2, "big") + body + data[_SOI:]
