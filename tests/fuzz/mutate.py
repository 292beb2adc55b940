"""Seeded mutations of files and of JSON bodies: small damage, so that the rest is still parsed."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

_EDGES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
_TEXTS = (
    "", " ", "\x00", "x" * 5000, "\ufdd0", "\u202e", "\U0001f468\u200d\U0001f469", "é" * 99,
    "<|im_end|>", "<|image_pad|>", "<|vision_start|>", "{{ 7 * 7 }}", "{% for x in y %}",
    "data:image/png;base64,", "data:,", "file:///etc/passwd", "http://127.0.0.1:9/", "http://[::1",
    "../../etc/passwd", "NaN", "null", "-1", "1e999", "\r\n\r\n", "a\tb", "'; DROP TABLE x; --",
)  # fmt: skip
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64 - 1, -(2**63), 0.0, -0.0, 1.5, 1e-320, 1e300,
    [], {}, [[]], [None], {"": None}, [0] * 200, {"type": "text"}, {"url": {}}, "user",
)  # fmt: skip


class Mutator:
    """Draws mutations.

    Args:
        seed: Equal seeds, equal mutations.
    """

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def file(self, files: Sequence[bytes]) -> bytes:
        """One of the files, damaged in one to four places; now and then whole."""
        data = bytearray(self._draw.choice(files))
        kinds: tuple[Callable[[bytearray], None], ...] = (
            self._flip, self._flip, self._edge, self._edge, self._cut, self._drop, self._repeat,
            self._zero, self._noise,
        )  # fmt: skip
        for _ in range(self._draw.choice((0, 1, 1, 1, 2, 2, 3, 4))):
            self._draw.choice(kinds)(data)
        if self._draw.random() < 0.05:
            other = self._draw.choice(files)
            at = self._draw.randrange(len(data) + 1)
            data[at:] = other[self._draw.randrange(len(other) + 1) :]
        return bytes(data)

    def json(self, bodies: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """One of the bodies with one to three of its nodes changed."""
        body = copy.deepcopy(self._draw.choice(bodies))
        for _ in range(self._draw.choice((1, 1, 2, 3))):
            self._change_node(body)
        return body

    def bytes_of_json(self, text: bytes) -> bytes:
        """JSON text, damaged as text."""
        data = bytearray(text)
        for _ in range(self._draw.choice((1, 1, 2, 5))):
            self._draw.choice((self._flip, self._cut, self._drop, self._repeat, self._noise))(data)
        if self._draw.random() < 0.1:
            depth = self._draw.choice((10, 100, 5000))
            data += b"[" * depth + b"]" * self._draw.choice((0, depth))
        return bytes(data)

    def choice(self, options: Sequence[Any]) -> Any:
        """One of the options."""
        return self._draw.choice(options)

    def chance(self, share: float) -> bool:
        """True in so many cases."""
        return self._draw.random() < share

    def _change_node(self, body: dict[str, Any]) -> None:
        nodes: list[Any] = [body]
        for node in nodes:
            children = node.values() if isinstance(node, dict) else node
            nodes.extend(child for child in children if isinstance(child, dict | list) and child)
        node = self._draw.choice(nodes)
        if not node:  # all of the body has been taken away
            return
        key = self._draw.choice(list(node) if isinstance(node, dict) else range(len(node)))
        kind = self._draw.randrange(6)
        if kind == 0:
            del node[key]
        elif kind == 1 and isinstance(node, list):
            node.extend([copy.deepcopy(node[key])] * self._draw.choice((1, 3, 40)))
        elif kind == 2 and isinstance(node, dict):
            node[self._draw.choice((*_TEXTS[:6], "type", "n", "stop", "seed"))] = node.pop(key)
        elif kind == 3:
            node[key] = {"x": node[key]} if self._draw.random() < 0.5 else [node[key]]
        elif kind == 4 and isinstance(node[key], str):
            at = self._draw.randrange(len(node[key]) + 1)
            node[key] = node[key][:at] + self._draw.choice(_TEXTS) + node[key][at:]
        else:
            node[key] = copy.deepcopy(self._draw.choice((*_VALUES, *_TEXTS)))

    def _at(self, data: bytearray) -> int:
        """More often near the beginning, where headers are."""
        near = self._draw.random() < 0.6
        return self._draw.randrange(min(len(data), 96) if near else len(data))

    def _flip(self, data: bytearray) -> None:
        if data:
            data[self._at(data)] ^= 1 << self._draw.randrange(8)

    def _edge(self, data: bytearray) -> None:
        if len(data) > 4:
            size = self._draw.choice((1, 2, 4))
            order = self._draw.choice(("big", "little"))
            value = self._draw.choice(_EDGES) & ((1 << 8 * size) - 1)
            at = self._at(data)
            data[at : at + size] = value.to_bytes(size, order)

    def _cut(self, data: bytearray) -> None:
        if data:
            del data[self._at(data) :]

    def _drop(self, data: bytearray) -> None:
        if data:
            at = self._at(data)
            del data[at : at + self._draw.choice((1, 2, 4, 16, 64))]

    def _repeat(self, data: bytearray) -> None:
        if data:
            at, size = self._at(data), self._draw.choice((1, 4, 16, 64))
            data[at:at] = data[at : at + size] * self._draw.choice((1, 2, 30))

    def _zero(self, data: bytearray) -> None:
        if data:
            at, size = self._at(data), self._draw.choice((4, 32, 256))
            data[at : at + size] = bytes(len(data[at : at + size]))

    def _noise(self, data: bytearray) -> None:
        at = self._at(data) if data else 0
        data[at:at] = self._draw.randbytes(self._draw.choice((1, 4, 32)))
