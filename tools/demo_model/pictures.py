"""Draws the pictures that ship in `chiasm/demo/pictures`, with their questions and answers.

Every answer is checked against the checkpoint before anything is written.
"""

from __future__ import annotations

import argparse
import io
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

from PIL import Image

from tools.demo_model import language as say
from tools.demo_model.answer import Checkpoint, Message, read_media
from tools.demo_model.clipfile import encode_mp4
from tools.demo_model.draw import DEFAULT_FACE, Size, draw_clip, draw_number, draw_shapes


@dataclass(frozen=True, slots=True)
class Case:
    """One entry of cases.json."""

    title: str
    parts: tuple[str, ...]
    question: str
    answer: str


def _shapes(name: str, size: Size, colour: str, shape: str, count: int) -> tuple[str, Image.Image]:
    return name, draw_shapes(random.Random(f"ship-{name}"), size, colour, shape, count)


def _number(name: str, size: Size, digits: str, take: int) -> tuple[str, Image.Image]:
    rng = random.Random(f"ship-{name}-{take}")
    return name, draw_number(rng, size, digits, 0.6, (DEFAULT_FACE,))


def _clip(
    name: str, size: Size, colour: str, shape: str, way: str
) -> tuple[str, list[Image.Image]]:
    frames = draw_clip(random.Random(f"ship-{name}"), size, colour, shape, way, 24)
    return name, frames


PICTURES = (
    _shapes("red_circle.png", (224, 224), "red", "circle", 1),
    _shapes("orange_star.jpg", (640, 420), "orange", "star", 1),
    _shapes("purple_cross.png", (180, 240), "purple", "cross", 1),
    _shapes("three_blue_squares.png", (280, 196), "blue", "square", 3),
    _shapes("six_green_triangles.png", (256, 256), "green", "triangle", 6),
    _shapes("four_yellow_stars.jpg", (480, 360), "yellow", "star", 4),
    _number("number_40317.png", (320, 160), "40317", 4),
    _number("number_862.png", (224, 224), "862", 1),
    _number("number_9051.jpg", (520, 300), "9051", 8),
)
CLIPS = (
    _clip("circle_moves_left.mp4", (168, 168), "red", "circle", "left"),
    _clip("square_moves_down.mp4", (160, 200), "blue", "square", "down"),
)
CASES = (
    Case("A shape", ("red_circle.png",), say.ASK_SHAPE[0], say.say_shape("red", "circle")),
    Case(
        "A photo-sized shape",
        ("orange_star.jpg",),
        say.ASK_SHAPE[4],
        say.say_shape("orange", "star"),
    ),
    Case("A colour", ("purple_cross.png",), say.ASK_COLOUR[0], say.say_colour("purple")),
    Case(
        "Counting to three",
        ("three_blue_squares.png",),
        "How many squares are there?",
        say.say_count(3, "blue", "square"),
    ),
    Case(
        "Counting to six",
        ("six_green_triangles.png",),
        say.ASK_COUNT_ANY[0],
        say.say_count(6, "green", "triangle"),
    ),
    Case(
        "Counting stars",
        ("four_yellow_stars.jpg",),
        "Count the stars.",
        say.say_count(4, "yellow", "star"),
    ),
    Case("Five digits", ("number_40317.png",), say.ASK_NUMBER[0], say.say_number("40317")),
    Case("Three digits", ("number_862.png",), say.ASK_NUMBER[2], say.say_number("862")),
    Case("A slanted number", ("number_9051.jpg",), say.ASK_NUMBER[1], say.say_number("9051")),
    Case(
        "Two pictures",
        ("red_circle.png", "purple_cross.png"),
        "Which picture shows a purple cross?",
        say.say_which(1),
    ),
    Case(
        "Two pictures, the first",
        ("orange_star.jpg", "red_circle.png"),
        "Which picture shows an orange star?",
        say.say_which(0),
    ),
    Case("A clip", ("circle_moves_left.mp4",), say.ASK_DIRECTION[0], say.say_direction("left")),
    Case(
        "Another clip", ("square_moves_down.mp4",), say.ASK_DIRECTION[2], say.say_direction("down")
    ),
)


def _encode(name: str, picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    if name.endswith(".png"):
        picture.save(buffer, format="PNG", optimize=True)
    else:
        picture.save(buffer, format="JPEG", quality=85)
    return buffer.getvalue()


def main() -> None:
    """Draw, ask, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demo", type=Path, default=Path("chiasm/demo"))
    demo = parser.parse_args().demo
    folder = demo / "pictures"
    for name, picture in PICTURES:
        (folder / name).write_bytes(_encode(name, picture))
    for name, frames in CLIPS:
        (folder / name).write_bytes(encode_mp4(frames))
    checkpoint = Checkpoint(demo / "checkpoint")
    for case in CASES:
        parts = (*(read_media(folder / part) for part in case.parts), case.question)
        given = checkpoint.answer([Message("user", parts)])
        print(f"{'right' if given == case.answer else 'WRONG'}  {case.title}: {given}")
        if given != case.answer:
            raise ValueError(f"{case.title}: expected {case.answer!r}")
    entries = [asdict(case) for case in CASES]
    (folder / "cases.json").write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
