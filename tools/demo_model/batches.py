"""Draws whole training batches in worker processes: one kind and one set of grids each."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from tools.demo_model import spec
from tools.demo_model.draw import DEFAULT_FACE, Size, extra_faces
from tools.demo_model.encode import Row, encode_sample, pad_rows
from tools.demo_model.model import Grid
from tools.demo_model.tasks import Clip, Mix, Sample, Setting, make_sample

Units = tuple[int, int]
UNIT = spec.PATCH * spec.MERGE
BATCH_SIZES = {"one": 512, "two": 320, "clip": 320, "text": 256}
KIND_WEIGHTS = {
    Mix.BROAD: {"one": 0.62, "two": 0.17, "clip": 0.18, "text": 0.03},
    Mix.NUMBERS: {"one": 0.82, "two": 0.08, "clip": 0.08, "text": 0.02},
}


@dataclass(frozen=True, slots=True)
class Style:
    """How a batch is drawn: the curriculum's level, which tasks, which fonts."""

    level: float = 1.0
    mix: Mix = Mix.BROAD
    faces: tuple[str, ...] = (DEFAULT_FACE,)


@dataclass(frozen=True, slots=True)
class Batch:
    """Tensors of one step; `pixels` is one [B, T, H, W, 3] of bytes per picture of a row."""

    shape: Shape
    ids: Tensor
    positions: Tensor
    slots: Tensor | None
    tasks: Tensor
    places: Tensor
    targets: Tensor
    pixels: tuple[Tensor, ...]

    def tensors(self) -> list[Tensor]:
        """List everything that lives on a device."""
        slots = [] if self.slots is None else [self.slots]
        return [
            self.ids,
            self.positions,
            self.tasks,
            self.places,
            self.targets,
            *slots,
            *self.pixels,
        ]

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(
            self.shape,
            change(self.ids),
            change(self.positions),
            None if self.slots is None else change(self.slots),
            change(self.tasks),
            change(self.places),
            change(self.targets),
            tuple(change(picture) for picture in self.pixels),
        )

    def to(self, device: torch.device) -> Batch:
        """Copy to a device."""
        return self._map(lambda tensor: tensor.to(device))

    def clone(self) -> Batch:
        """Copy on the device."""
        return self._map(torch.clone)


def resized(height: int, width: int, max_pixels: int) -> tuple[int, int]:
    """Give the size the processor resizes a picture to: whole units within the pixel limits."""
    tall, wide = (max(UNIT, round(side / UNIT) * UNIT) for side in (height, width))
    if tall * wide > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        return math.floor(height / shrink / UNIT) * UNIT, math.floor(width / shrink / UNIT) * UNIT
    if tall * wide < spec.MIN_PIXELS:
        grow = math.sqrt(spec.MIN_PIXELS / (height * width))
        return math.ceil(height * grow / UNIT) * UNIT, math.ceil(width * grow / UNIT) * UNIT
    return tall, wide


def _unit_grids(max_pixels: int, most_stretched: float) -> list[Units]:
    least, most = spec.MIN_PIXELS // UNIT**2, max_pixels // UNIT**2
    sides = range(2, 17)
    every = [
        (rows, columns) for rows in sides for columns in sides if least <= rows * columns <= most
    ]
    return [units for units in every if max(units) <= most_stretched * min(units)]


@dataclass(frozen=True, slots=True)
class Shape:
    """What all rows of a batch share; few are used, because each is captured as a CUDA graph."""

    kind: str
    units: tuple[Units, ...]
    num_frames: int = 1

    @property
    def grids(self) -> list[Grid]:
        """Give the grid of each picture."""
        depth = max(1, self.num_frames // spec.TEMPORAL_PATCH)
        return [(depth, spec.MERGE * rows, spec.MERGE * columns) for rows, columns in self.units]

    @property
    def max_pixels(self) -> int:
        """Give the processor's limit for these pictures."""
        return spec.VIDEO_MAX_PIXELS if self.kind == "clip" else spec.MAX_PIXELS

    @property
    def length(self) -> int:
        """Give the padded length of a row."""
        media = sum(math.prod(grid) // spec.MERGE**2 for grid in self.grids)
        return -(-(media + TEXT_ROOM[self.kind]) // 8) * 8


def _shapes() -> dict[str, list[Shape]]:
    rng = random.Random("shapes")
    images, clips = _unit_grids(spec.MAX_PIXELS, 3.2), _unit_grids(spec.VIDEO_MAX_PIXELS, 2.6)
    # What cameras and screens give: squares, 4:3, 3:2, 16:9, upright too.
    common = [(8, 8), (6, 9), (9, 6), (6, 10), (10, 6), (4, 4), (5, 5), (6, 6), (7, 7), (6, 8)]
    rare = rng.sample([units for units in images if units not in common], 34)
    pairs = [((8, 8), (8, 8)), ((4, 4), (4, 4)), ((6, 9), (6, 9)), ((6, 6), (6, 6))]
    pairs += [(rng.choice(common + rare), rng.choice(common + rare)) for _ in range(18)]
    moving = [((6, 6), frames) for frames in (4, 6, 8)] + [((5, 7), frames) for frames in (4, 6, 8)]
    moving += [((4, 4), 4), ((4, 4), 8), ((7, 5), 4)] + [
        (rng.choice(clips), rng.choice((4, 4, 6, 8))) for _ in range(15)
    ]
    return {
        "one": [Shape("one", (units,)) for units in common * 3 + rare],
        "two": [Shape("two", pair) for pair in pairs],
        "clip": [Shape("clip", (units,), frames) for units, frames in moving],
        "text": [Shape("text", ())],
    }


TEXT_ROOM = {"one": 80, "two": 96, "clip": 80, "text": 96}  # tokens of a row that are not pictures
LEARNED_ROOM = {
    "one": 18,
    "two": 14,
    "clip": 12,
    "text": 48,
}  # learned tokens per row, on average at most
SHAPES = _shapes()


def pick_canvas(rng: random.Random, units: Units, max_pixels: int) -> Size:
    """Choose a picture size that the processor's rule resizes to exactly these units."""
    height, width = units[0] * UNIT, units[1] * UNIT
    for _ in range(4):
        scale = 1.0 if rng.random() < 0.6 else rng.uniform(0.8, 2.6)
        tall = int((height + rng.randint(-13, 13)) * scale)
        wide = int((width + rng.randint(-13, 13)) * scale)
        if resized(tall, wide, max_pixels) == (height, width):
            return wide, tall
    return width, height


def to_bytes(part: Image.Image | Clip, units: Units) -> np.ndarray:
    """Resize to the grid as the processor does: [T, H, W, 3]."""
    size = (units[1] * UNIT, units[0] * UNIT)
    frames = part.frames if isinstance(part, Clip) else (part,)
    return np.stack([np.asarray(frame.resize(size, Image.Resampling.BICUBIC)) for frame in frames])


def _draw_row(rng: random.Random, shape: Shape, style: Style) -> tuple[Sample, Row]:
    """Draw one conversation that fits the row length."""
    second_per_grid = 1.0 if rng.random() < 0.7 else rng.uniform(0.7, 1.4)
    while True:
        canvases = tuple(
            (unit[1] * UNIT, unit[0] * UNIT)
            if style.level <= 0
            else pick_canvas(rng, unit, shape.max_pixels)
            for unit in shape.units
        )
        setting = Setting(canvases, style.level, style.faces, shape.num_frames, style.mix)
        sample = make_sample(rng, shape.kind, setting)
        row = encode_sample(sample, shape.grids, second_per_grid)
        if len(row.ids) <= shape.length:
            return sample, row


def make_batch(rng: random.Random, shape: Shape, batch_size: int, style: Style) -> Batch:
    """Draw one batch."""
    pictures: list[list[np.ndarray]] = [[] for _ in shape.units]
    drawn = [_draw_row(rng, shape, style) for _ in range(batch_size)]
    for sample, _ in drawn:
        media = [part for turn in sample.turns for part in turn.parts if not isinstance(part, str)]
        for index, part in enumerate(media):
            pictures[index].append(to_bytes(part, shape.units[index]))
    rows = pad_rows(
        [row for _, row in drawn],
        [sample.task for sample, _ in drawn],
        length=shape.length,
        num_learned=batch_size * LEARNED_ROOM[shape.kind],
    )
    return Batch(
        shape,
        torch.from_numpy(rows.ids),
        torch.from_numpy(rows.positions),
        None if rows.slots is None else torch.from_numpy(rows.slots),
        torch.from_numpy(rows.tasks),
        torch.from_numpy(rows.places),
        torch.from_numpy(rows.targets),
        tuple(torch.from_numpy(np.stack(picture)) for picture in pictures),
    )


def pick_shape(rng: random.Random, style: Style) -> Shape:
    """Choose what the next batch holds; numbers begin on one large square."""
    weights = KIND_WEIGHTS[style.mix]
    kind = rng.choices(tuple(weights), tuple(weights.values()))[0]
    if kind == "one" and style.level <= 0.1 and rng.random() < 0.7:
        return Shape("one", ((8, 8),))
    return rng.choice(SHAPES[kind])


class DrawnBatches(IterableDataset):  # type: ignore[type-arg]
    """An endless stream of batches; the level is read from shared memory before each."""

    def __init__(self, *, seed: str, level: Synchronized[float], scale: float, mix: Mix) -> None:
        self._seed = seed
        self._level = level
        self._scale = scale
        self._mix = mix

    def __iter__(self) -> Iterator[Batch]:
        """Draw for ever, from a seed of this worker's own."""
        torch.set_num_threads(1)
        info = get_worker_info()
        rng = random.Random(f"{self._seed}-{info.id if info else 0}")
        faces = (DEFAULT_FACE, DEFAULT_FACE, *extra_faces())
        while True:
            style = Style(self._level.value, self._mix, faces)
            shape = pick_shape(rng, style)
            size = max(4, int(BATCH_SIZES[shape.kind] * self._scale))
            yield make_batch(rng, shape, size, style)
