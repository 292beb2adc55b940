"""Makes the conversations the demo model learns: what is drawn, asked and answered.

A batch of training samples shares a kind (which media, in which order) and canvas sizes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from PIL import Image

from tools.demo_model import language as say
from tools.demo_model.draw import Size, draw_clip, draw_number, draw_plain, draw_shapes

TASKS = ("shape", "count", "number", "plain", "which", "clip", "text")


class Mix(StrEnum):
    """Which tasks training draws most."""

    BROAD = "broad"
    NUMBERS = "numbers"


@dataclass(frozen=True, slots=True)
class Clip:
    """Frames sampled at two a second."""

    frames: tuple[Image.Image, ...]


Part = str | Image.Image | Clip


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user sends and the right answer."""

    parts: tuple[Part, ...]
    answer: str


@dataclass(frozen=True, slots=True)
class Sample:
    """A conversation; `task` names the task of its first picture."""

    task: str
    turns: tuple[Turn, ...]
    system: str = say.SYSTEM_PROMPTS[0]


@dataclass(frozen=True, slots=True)
class Setting:
    """How to draw: one canvas per picture, the curriculum's level, fonts, frames per clip."""

    canvases: tuple[Size, ...]
    level: float = 1.0
    faces: tuple[str, ...] = ()
    num_frames: int = 4
    mix: Mix = Mix.BROAD


@dataclass(frozen=True, slots=True)
class Scene:
    """One drawn picture with its question, answer and later questions about it."""

    task: str
    part: Image.Image | Clip
    question: str
    answer: str
    later: tuple[tuple[str, str], ...]


def _thing(rng: random.Random) -> tuple[str, str]:
    return rng.choice(tuple(say.COLOURS)), rng.choice(say.SHAPES)


def _shape_details(rng: random.Random, colour: str, shape: str) -> tuple[tuple[str, str], ...]:
    return (
        (rng.choice(say.ASK_COLOUR), say.say_colour(colour)),
        (rng.choice(say.ASK_SHAPE_ONLY), say.say_shape_only(shape)),
        (rng.choice(say.ASK_COUNT_ANY), say.say_count(1, colour, shape)),
        (rng.choice(say.ASK_SHAPE), say.say_shape(colour, shape)),
    )


def shape_scene(rng: random.Random, canvas: Size, setting: Setting) -> Scene:
    """One shape in one colour."""
    colour, shape = _thing(rng)
    picture = draw_shapes(rng, canvas, colour, shape, 1)
    details = _shape_details(rng, colour, shape)
    if rng.random() < 0.15:
        return Scene("shape", picture, *rng.choice(details[:2]), details)
    return Scene("shape", picture, rng.choice(say.ASK_SHAPE), say.say_shape(colour, shape), details)


def count_scene(rng: random.Random, canvas: Size, setting: Setting) -> Scene:
    """One to six equal shapes."""
    colour, shape = _thing(rng)
    count = rng.randint(1, 6)
    answer = say.say_count(count, colour, shape)

    def ask() -> str:
        things = rng.choice((say.plural(shape), f"{colour} {say.plural(shape)}", "shapes"))
        return rng.choice(
            (rng.choice(say.ASK_COUNT_ANY), rng.choice(say.ASK_COUNT).format(things=things))
        )

    picture = draw_shapes(rng, canvas, colour, shape, count)
    later = ((ask(), answer),)
    if count == 1:
        later += _shape_details(rng, colour, shape)
    return Scene("count", picture, ask(), answer, later)


def number_scene(rng: random.Random, canvas: Size, setting: Setting) -> Scene:
    """A printed number of three to five digits."""
    digits = rng.choice("123456789") + "".join(
        rng.choice("0123456789") for _ in range(rng.randint(2, 4))
    )
    picture = draw_number(rng, canvas, digits, setting.level, setting.faces)
    answer = say.say_number(digits)
    return Scene(
        "number",
        picture,
        rng.choice(say.ASK_NUMBER),
        answer,
        ((rng.choice(say.ASK_NUMBER), answer),),
    )


def plain_scene(rng: random.Random, canvas: Size, setting: Setting) -> Scene:
    """A picture of a single colour."""
    colour = rng.choice(tuple(say.COLOURS))
    answer = f"The picture is all {colour}."
    picture = draw_plain(rng, canvas, colour)
    later = ((rng.choice(say.ASK_COLOUR), say.say_colour(colour)),)
    if rng.random() < 0.4:
        return Scene("plain", picture, "What colour is the picture?", answer, later)
    return Scene("plain", picture, rng.choice(say.ASK_SHAPE[:7]), answer, later)


SINGLE_SCENES = (shape_scene, count_scene, number_scene, plain_scene)
# How often each of them is drawn: the first two thirds of the training, then the last.
SCENE_WEIGHTS = {Mix.BROAD: (0.24, 0.32, 0.40, 0.04), Mix.NUMBERS: (0.14, 0.25, 0.58, 0.03)}


def any_scene(rng: random.Random, canvas: Size, setting: Setting) -> Scene:
    """Choose one of the one-picture scenes."""
    make = rng.choices(SINGLE_SCENES, SCENE_WEIGHTS[setting.mix])[0]
    return make(rng, canvas, setting)


def clip_scene(rng: random.Random, canvas: Size, setting: Setting) -> Scene:
    """A shape that moves one way."""
    colour, shape = _thing(rng)
    direction = rng.choice(say.DIRECTIONS)
    clip = Clip(tuple(draw_clip(rng, canvas, colour, shape, direction, setting.num_frames)))
    moves = (rng.choice(say.ASK_DIRECTION), say.say_direction(direction))
    mover = (rng.choice(say.ASK_MOVER), say.say_mover(colour, shape))
    if rng.random() < 0.15:
        return Scene("clip", clip, *mover, (moves, mover))
    return Scene("clip", clip, *moves, (mover, moves))


def _order(rng: random.Random, media: Sequence[Part], question: str) -> tuple[Part, ...]:
    return (question, *media) if rng.random() < 0.2 else (*media, question)


def _chat(rng: random.Random, scene: Scene) -> list[Turn]:
    turns = [Turn(_order(rng, [scene.part], scene.question), scene.answer)]
    while scene.later and rng.random() < 0.25 and len(turns) < 3:
        question, answer = rng.choice(scene.later)
        turns.append(Turn((question,), answer))
    return turns


def _pleasantry(rng: random.Random) -> Turn:
    answer = rng.choice(tuple(say.PLEASANTRIES)[:-1])
    return Turn((rng.choice(say.PLEASANTRIES[answer]),), answer)


def which_turns(rng: random.Random, setting: Setting) -> list[Turn]:
    """Two pictures at once: which of them holds a thing?"""
    things = [_thing(rng)]
    while len(things) < 2:
        colour, shape = _thing(rng)
        near = rng.choice(((things[0][0], shape), (colour, things[0][1]), (colour, shape)))
        if near != things[0]:
            things.append(near)
    pictures = [
        draw_shapes(rng, canvas, *thing, 1)
        for canvas, thing in zip(setting.canvases, things, strict=True)
    ]
    wanted = rng.randint(0, 1)

    def ask(index: int) -> str:
        colour, shape = things[index]
        name = shape if things[0][1] != things[1][1] and rng.random() < 0.2 else f"{colour} {shape}"
        article = "the " if rng.random() < 0.2 else ""
        return rng.choice(say.ASK_WHICH[:-1]).format(
            thing=article + name if article else say.with_article(name)
        )

    turns = [Turn(_order(rng, pictures, ask(wanted)), say.say_which(wanted))]
    if rng.random() < 0.3:
        other = rng.randint(0, 1)
        question = say.ASK_WHICH[-1].format(thing=say.with_article(" ".join(things[other])))
        turns.append(Turn((rng.choice((question, ask(other))),), say.say_which(other)))
    return turns


def _text_turns(rng: random.Random) -> list[Turn]:
    if rng.random() < 0.2:
        answer = tuple(say.PLEASANTRIES)[-1]
        return [Turn((rng.choice(say.PLEASANTRIES[answer]),), answer)]
    return [_pleasantry(rng) for _ in range(rng.choice((1, 1, 2, 3)))]


def make_sample(rng: random.Random, kind: str, setting: Setting) -> Sample:
    """Draw one conversation of a kind: `one` picture, `two` pictures, a `clip`, or `text`."""
    if kind == "one":
        scene = any_scene(rng, setting.canvases[0], setting)
        task, turns = scene.task, _chat(rng, scene)
    elif kind == "two" and rng.random() < 0.75:
        task, turns = "which", which_turns(rng, setting)
    elif kind == "two":
        scenes = [any_scene(rng, canvas, setting) for canvas in setting.canvases]
        task, turns = scenes[1].task, [turn for scene in scenes for turn in _chat(rng, scene)]
    elif kind == "clip":
        scene = clip_scene(rng, setting.canvases[0], setting)
        task, turns = scene.task, _chat(rng, scene)
    elif kind == "text":
        task, turns = "text", _text_turns(rng)
    else:
        raise ValueError(f"no kind {kind!r}")
    if kind != "text" and rng.random() < 0.12:
        turns.insert(rng.choice((0, len(turns))), _pleasantry(rng))
    system = rng.choice(say.SYSTEM_PROMPTS) if rng.random() < 0.2 else say.SYSTEM_PROMPTS[0]
    return Sample(task, tuple(turns), system)
