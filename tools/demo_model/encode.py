"""Turns conversations into token ids, labels, positions and picture slots.

The same result as chat template plus processor gives, built without either.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tools.demo_model import spec
from tools.demo_model.model import Grid
from tools.demo_model.tasks import TASKS, Clip, Sample
from tools.demo_model.tokenizer import build_tokenizer, token_ids

IGNORED = -100
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Row:
    """One encoded conversation."""

    ids: list[int]
    labels: list[int]
    positions: Ints  # [3, S]
    slots: list[int]


@dataclass(frozen=True, slots=True)
class Rows:
    """A padded batch; `targets` are the learned tokens, `places` where they are predicted."""

    ids: Ints  # [B, S]
    positions: Ints  # [3, B, S]
    slots: Ints | None  # [B, N]
    tasks: Ints  # [B], index into TASKS
    places: Ints  # [T], into B * S
    targets: Ints  # [T]


@functools.lru_cache(maxsize=1)
def _tokenizer():  # type: ignore[no-untyped-def]
    return build_tokenizer()


@functools.lru_cache(maxsize=100_000)
def _encode(text: str) -> tuple[int, ...]:
    return tuple(_tokenizer().encode(text).ids)


class RowBuilder:
    """Collects ids with labels and positions, left to right."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._labels: list[int] = []
        self._positions: list[Ints] = []
        self._slots: list[int] = []
        self._next = 0

    def text(self, text: str, *, learned: bool = False) -> None:
        """Append text, special tokens included."""
        ids = _encode(text)
        self._ids += ids
        self._labels += ids if learned else [IGNORED] * len(ids)
        self._positions.append(np.arange(self._next, self._next + len(ids))[None].repeat(3, axis=0))
        self._next += len(ids)

    def media(self, grid: Grid, *, pad: str, interval: float) -> None:
        """Append one placeholder run; `interval` is the step in time between grid frames."""
        frames, rows, columns = grid[0], grid[1] // spec.MERGE, grid[2] // spec.MERGE
        where = np.stack(
            np.meshgrid(np.arange(frames), np.arange(rows), np.arange(columns), indexing="ij")
        )
        where = where.reshape(3, -1)
        where[0] = (where[0] * interval).astype(np.int64)
        self._slots += range(len(self._ids), len(self._ids) + where.shape[1])
        self._ids += [token_ids()[pad]] * where.shape[1]
        self._labels += [IGNORED] * where.shape[1]
        self._positions.append(where + self._next)
        self._next += max(rows, columns)

    def finish(self) -> Row:
        """Give the row."""
        return Row(self._ids, self._labels, np.concatenate(self._positions, axis=1), self._slots)


def encode_sample(sample: Sample, grids: Sequence[Grid], second_per_grid: float) -> Row:
    """Encode a conversation whose media have these grids, in order."""
    row = RowBuilder()
    remaining = iter(grids)
    row.text(f"<|im_start|>system\n{sample.system}<|im_end|>\n")
    for turn in sample.turns:
        lead = "<|im_start|>user\n"
        for part in turn.parts:
            if isinstance(part, str):
                lead += part
                continue
            row.text(lead + "<|vision_start|>")
            lead = "<|vision_end|>"
            pad = "<|image_pad|>" if isinstance(part, Image.Image) else "<|video_pad|>"
            interval = spec.TOKENS_PER_SECOND * second_per_grid if isinstance(part, Clip) else 1
            row.media(next(remaining), pad=pad, interval=interval)
        row.text(lead + "<|im_end|>\n<|im_start|>assistant\n")
        row.text(f"{turn.answer}<|im_end|>", learned=True)
        row.text("\n")
    return row.finish()


def pad_rows(rows: Sequence[Row], tasks: Sequence[str], *, length: int, num_learned: int) -> Rows:
    """Pad on the right, shift the labels by one, list exactly `num_learned` places."""
    ids = np.zeros((len(rows), length), dtype=np.int64)
    labels = np.full((len(rows), length), IGNORED, dtype=np.int64)
    positions = np.zeros((3, len(rows), length), dtype=np.int64)
    for index, row in enumerate(rows):
        size = len(row.ids)
        ids[index, :size] = row.ids
        labels[index, : size - 1] = row.labels[1:]
        positions[:, index, :size] = row.positions
    slots = np.array([row.slots for row in rows], dtype=np.int64)
    numbered = np.array([TASKS.index(task) for task in tasks], dtype=np.int64)
    places, targets = (
        np.zeros(num_learned, dtype=np.int64),
        np.full(num_learned, IGNORED, dtype=np.int64),
    )
    found = np.flatnonzero(labels != IGNORED)[:num_learned]
    places[: found.size], targets[: found.size] = found, labels.reshape(-1)[found]
    return Rows(ids, positions, slots if slots.size else None, numbered, places, targets)
