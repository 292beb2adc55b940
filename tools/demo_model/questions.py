"""Draws the evaluation's questions: seeds, sizes and files that training has not seen."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from dataclasses import dataclass

from tools.demo_model import language as say
from tools.demo_model import spec
from tools.demo_model.answer import MediaFile, Message
from tools.demo_model.batches import SHAPES, pick_canvas
from tools.demo_model.clipfile import FILE_FPS, encode_mp4
from tools.demo_model.draw import Size
from tools.demo_model.tasks import (
    Clip,
    Part,
    Scene,
    Setting,
    clip_scene,
    count_scene,
    number_scene,
    shape_scene,
    which_turns,
)


@dataclass(frozen=True, slots=True)
class Question:
    """A chat that ends with the user's turn, and the only answer that counts as right."""

    messages: tuple[Message, ...]
    answer: str


def _file(part: Part) -> str | MediaFile:
    if isinstance(part, str):
        return part
    if isinstance(part, Clip):
        return MediaFile("video/mp4", encode_mp4(part.frames))
    buffer = io.BytesIO()
    part.save(buffer, format="PNG")
    return MediaFile("image/png", buffer.getvalue())


def _canvas(rng: random.Random) -> Size:
    """Choose a picture size: mostly as trained, else anything up to 3:1 and 640 wide."""
    if rng.random() < 0.7:
        return pick_canvas(rng, rng.choice(SHAPES["one"]).units[0], spec.MAX_PIXELS)
    long_side = rng.randint(112, 640)
    short_side = rng.randint(max(96, long_side // 3), long_side)
    sides = (long_side, short_side) if rng.random() < 0.6 else (short_side, long_side)
    return sides if rng.random() < 0.8 else (long_side, long_side)


def _one(rng: random.Random, make: Callable[[random.Random, Size, Setting], Scene]) -> Question:
    canvas = _canvas(rng)
    scene = make(rng, canvas, Setting((canvas,)))
    return Question((Message("user", (_file(scene.part), scene.question)),), scene.answer)


def _which(rng: random.Random) -> Question:
    turn = which_turns(rng, Setting((_canvas(rng), _canvas(rng))))[0]
    return Question((Message("user", tuple(map(_file, turn.parts))),), turn.answer)


def _clip(rng: random.Random) -> Question:
    width, height = pick_canvas(rng, rng.choice(SHAPES["clip"]).units[0], spec.VIDEO_MAX_PIXELS)
    canvas = (width // 2 * 2, height // 2 * 2)
    frames = FILE_FPS * rng.choice((2, 3, 4))
    scene = clip_scene(rng, canvas, Setting((canvas,), num_frames=frames))
    return Question((Message("user", (_file(scene.part), scene.question)),), scene.answer)


def _text(rng: random.Random) -> Question:
    answer = rng.choice(tuple(say.PLEASANTRIES))
    return Question((Message("user", (rng.choice(say.PLEASANTRIES[answer]),)),), answer)


def _chat(rng: random.Random) -> Question:
    """Ask again about the same picture, or about a second one."""
    first_canvas, second_canvas = _canvas(rng), _canvas(rng)
    first = rng.choice((shape_scene, count_scene))(rng, first_canvas, Setting((first_canvas,)))
    opening = (
        Message("user", (_file(first.part), first.question)),
        Message("assistant", (first.answer,)),
    )
    if rng.random() < 0.5:
        question, answer = rng.choice(first.later)
        return Question((*opening, Message("user", (question,))), answer)
    second = rng.choice((shape_scene, count_scene, number_scene))(
        rng, second_canvas, Setting((second_canvas,))
    )
    return Question(
        (*opening, Message("user", (_file(second.part), second.question))), second.answer
    )


TASKS: dict[str, Callable[[random.Random], Question]] = {
    "shape and colour": lambda rng: _one(rng, shape_scene),
    "count": lambda rng: _one(rng, count_scene),
    "number": lambda rng: _one(rng, number_scene),
    "two pictures": _which,
    "clip": _clip,
    "second turn": _chat,
    "text only": _text,
}


def question(task: str, index: int) -> Question:
    """Draw one question of a task; training's seeds begin otherwise, so none is seen twice."""
    return TASKS[task](random.Random(f"unseen-{task}-{index}"))
