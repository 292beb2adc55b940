"""Questions about drawn pictures; every request carries a file that was never sent before."""

from __future__ import annotations

import base64
import itertools
import secrets
import struct
import zlib
from dataclasses import dataclass
from typing import Any

from tools.demo_model.answer import MediaFile
from tools.demo_model.questions import question

TASKS = ("shape and colour", "count", "number")
FIRST_INDEX = 1000  # the evaluation of the checkpoint uses the first few hundred
_HEADER_END = 33  # of a PNG: signature and IHDR


@dataclass(frozen=True, slots=True)
class Item:
    """One picture, what is asked about it and the right answer."""

    picture: bytes
    text: str
    answer: str


class Pool:
    """Deals items in turn.

    A serial number, of this pool alone, is written into a text chunk of each PNG dealt: the same
    pixels, other bytes, so that no cache of a server can know the picture.

    Args:
        size: Different pictures.
    """

    def __init__(self, size: int) -> None:
        self.items = tuple(_draw(index) for index in range(size))
        self._name = secrets.token_hex(8).encode()
        self._serials = itertools.count()

    def messages(self, index: int) -> list[dict[str, Any]]:
        """An OpenAI chat with the item of that index, as a file of its own."""
        item = self.items[index]
        data = _with_text(item.picture, b"serial\0%s-%d" % (self._name, next(self._serials)))
        url = f"data:image/png;base64,{base64.b64encode(data).decode('ascii')}"
        picture = {"type": "image_url", "image_url": {"url": url}}
        return [{"role": "user", "content": [picture, {"type": "text", "text": item.text}]}]


def _draw(index: int) -> Item:
    drawn = question(TASKS[index % len(TASKS)], FIRST_INDEX + index)
    (message,) = drawn.messages
    picture, text = message.parts
    assert isinstance(picture, MediaFile) and isinstance(text, str)
    return Item(picture.content, text, drawn.answer)


def _with_text(png: bytes, text: bytes) -> bytes:
    body = b"tEXt" + text
    chunk = struct.pack(">I", len(text)) + body + struct.pack(">I", zlib.crc32(body))
    return png[:_HEADER_END] + chunk + png[_HEADER_END:]
