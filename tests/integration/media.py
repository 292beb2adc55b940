"""Pictures and clips drawn for tests, as data URIs."""

from __future__ import annotations

import base64
import io

import av
import numpy as np
from PIL import Image, ImageDraw


def data_uri(data: bytes, kind: str = "image/png") -> str:
    """A data URI of a file's bytes."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def encode(image: Image.Image, image_format: str = "PNG", **options: object) -> bytes:
    """A picture's file."""
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return buffer.getvalue()


def circle(colour: str = "red", size: tuple[int, int] = (224, 224)) -> Image.Image:
    """A filled circle in the middle of white."""
    image = Image.new("RGB", size, "white")
    side = min(size) // 2
    left, top = (size[0] - side) // 2, (size[1] - side) // 2
    ImageDraw.Draw(image).ellipse((left, top, left + side, top + side), fill=colour)
    return image


def clip(frames: int = 8, fps: int = 4, size: int = 112) -> bytes:
    """An mp4 of a square that moves to the right."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width = stream.height = size
        stream.pix_fmt = "yuv420p"
        for index in range(frames):
            image = Image.new("RGB", (size, size), "white")
            left = 4 + index * (size - 40) // max(1, frames - 1)
            ImageDraw.Draw(image).rectangle((left, 40, left + 30, 70), fill="blue")
            for packet in stream.encode(av.VideoFrame.from_ndarray(np.asarray(image))):
                container.mux(packet)
        for packet in stream.encode(None):
            container.mux(packet)
    return buffer.getvalue()


def image_part(image: Image.Image | bytes) -> dict[str, object]:
    """An `image_url` content part."""
    data = image if isinstance(image, bytes) else encode(image)
    return {"type": "image_url", "image_url": {"url": data_uri(data)}}


def text_part(text: str) -> dict[str, object]:
    """A `text` content part."""
    return {"type": "text", "text": text}
