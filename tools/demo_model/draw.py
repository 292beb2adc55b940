"""Draws the pictures: shapes, printed numbers and moving shapes.

Owns pixels and nothing else; every choice comes from the random generator it is given.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import math
import random
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from tools.demo_model.language import COLOURS

Colour = tuple[int, int, int]
Size = tuple[int, int]
Point = tuple[float, float]
DEFAULT_FACE = ""
MIN_CONTRAST = 122.0


def extra_faces() -> tuple[str, ...]:
    """Find the fonts matplotlib carries, if installed; only training uses them, for variety."""
    found = importlib.util.find_spec("matplotlib")
    if found is None or not found.submodule_search_locations:
        return ()
    folder = Path(found.submodule_search_locations[0]) / "mpl-data" / "fonts" / "ttf"
    names = ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSansMono.ttf", "DejaVuSerif.ttf")
    return tuple(str(folder / name) for name in names if (folder / name).exists())


@functools.lru_cache(maxsize=512)
def font(face: str, size: int) -> ImageFont.FreeTypeFont:
    """Load a face once per size; the default face is the one Pillow carries."""
    loaded = (
        ImageFont.load_default(size) if face == DEFAULT_FACE else ImageFont.truetype(face, size)
    )
    if not isinstance(loaded, ImageFont.FreeTypeFont):
        raise ValueError("Pillow was built without FreeType")
    return loaded


def distance(one: Colour, other: Colour) -> float:
    """Measure how far two colours are apart."""
    return math.dist(one, other)


def shade(rng: random.Random, colour: Colour, spread: int) -> Colour:
    """Vary a colour a little."""
    red, green, blue = (max(0, min(255, value + rng.randint(-spread, spread))) for value in colour)
    return red, green, blue


def _random_ground(rng: random.Random) -> Colour:
    roll = rng.random()
    if roll < 0.45:
        base = rng.randint(215, 255)
        return shade(rng, (base, base, base), 18)
    if roll < 0.65:
        base = rng.randint(0, 60)
        return shade(rng, (base, base, base), 14)
    if roll < 0.8:
        base = rng.randint(90, 190)
        return shade(rng, (base, base, base), 12)
    return rng.randint(0, 255), rng.randint(0, 255), rng.randint(0, 255)


def ground_colour(rng: random.Random, figures: Sequence[Colour]) -> Colour:
    """Choose a background that contrasts with every figure colour."""
    for _ in range(60):
        ground = _random_ground(rng)
        if all(distance(ground, figure) > MIN_CONTRAST for figure in figures):
            return ground
    bright = sum(figures[0]) > 380
    return (15, 15, 15) if bright else (240, 240, 240)


def draw_ground(rng: random.Random, size: Size, figures: Sequence[Colour]) -> Image.Image:
    """Draw a background: plain, shaded, or with faint marks."""
    ground = ground_colour(rng, figures)
    roll = rng.random()
    if roll < 0.2:
        corners = Image.new("RGB", (2, 2))
        for corner in range(4):
            near = shade(rng, ground, 30)
            safe = all(distance(near, figure) > MIN_CONTRAST * 0.8 for figure in figures)
            corners.putpixel((corner % 2, corner // 2), near if safe else ground)
        return corners.resize(size, Image.Resampling.BILINEAR)
    picture = Image.new("RGB", size, ground)
    if roll < 0.35:
        pen = ImageDraw.Draw(picture)
        faint = shade(rng, ground, 16)
        for _ in range(rng.randint(2, 7)):
            ends = [
                rng.randint(0, size[0]),
                rng.randint(0, size[1]),
                rng.randint(0, size[0]),
                rng.randint(0, size[1]),
            ]
            pen.line(ends, fill=faint, width=rng.randint(1, 3))
    return picture


def _corners(centre: Point, angles: Sequence[float], radii: Sequence[float]) -> list[Point]:
    return [
        (centre[0] + radius * math.sin(angle), centre[1] - radius * math.cos(angle))
        for angle, radius in zip(angles, radii, strict=True)
    ]


def outline(shape: str, centre: Point, radius: float, turn: float, waist: float) -> list[Point]:
    """Give the corners of a shape; `turn` is in radians, `waist` is star or cross thickness."""
    if shape == "triangle":
        return _corners(
            centre, [turn + index * math.tau / 3 for index in range(3)], [radius * 1.1] * 3
        )
    if shape == "square":
        return _corners(
            centre, [turn + (index + 0.5) * math.tau / 4 for index in range(4)], [radius * 1.15] * 4
        )
    if shape == "star":
        radii = [radius * 1.1 if index % 2 == 0 else radius * waist * 1.25 for index in range(10)]
        return _corners(centre, [turn + index * math.tau / 10 for index in range(10)], radii)
    if shape == "cross":
        arm = radius * waist
        flat = [(arm, radius), (arm, arm), (radius, arm)]
        points: list[Point] = []
        for quarter in range(4):
            for along, out in flat:
                x, y = along, -out
                for _ in range(quarter):
                    x, y = -y, x
                points.append((x, y))
        cos, sin = math.cos(turn), math.sin(turn)
        return [(centre[0] + x * cos - y * sin, centre[1] + x * sin + y * cos) for x, y in points]
    raise ValueError(f"no outline for {shape!r}")


def draw_shape(
    pen: ImageDraw.ImageDraw,
    shape: str,
    centre: Point,
    radius: float,
    look: tuple[float, float],
    colour: Colour,
) -> None:
    """Draw one filled shape; `look` is its turn and waist."""
    if shape == "circle":
        box = [centre[0] - radius, centre[1] - radius, centre[0] + radius, centre[1] + radius]
        pen.ellipse(box, fill=colour)
    else:
        pen.polygon(outline(shape, centre, radius, *look), fill=colour)


def _look(rng: random.Random) -> tuple[float, float]:
    return math.radians(rng.uniform(-14, 14)), rng.uniform(0.3, 0.42)


def _oversampling(rng: random.Random, size: Size) -> int:
    """Smooth the edges of most small pictures by drawing them twice as large."""
    return 2 if max(size) <= 330 and rng.random() < 0.65 else 1


def spoil(rng: random.Random, picture: Image.Image) -> Image.Image:
    """Sometimes pass the picture through JPEG, as a user's would have been."""
    if rng.random() > 0.2:
        return picture
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=rng.randint(45, 95))
    return Image.open(buffer).convert("RGB")


def draw_shapes(rng: random.Random, size: Size, colour: str, shape: str, count: int) -> Image.Image:
    """Draw `count` equal shapes that do not touch."""
    tint = shade(rng, COLOURS[colour], 14)
    factor = _oversampling(rng, size)
    width, height = size[0] * factor, size[1] * factor
    side = min(width, height)
    biggest = (
        0.44 * side if count == 1 else min(0.3 * side, math.sqrt(width * height / count) * 0.36)
    )
    smallest = min(biggest * 0.75, max(0.1 * side, 0.05 * math.sqrt(width * height)))
    picture = draw_ground(rng, (width, height), [tint])
    pen = ImageDraw.Draw(picture)
    radius = rng.uniform(smallest, biggest)
    placed: list[tuple[float, float, float]] = []
    while len(placed) < count:
        placed.clear()
        for _ in range(count * 12):
            own = radius * rng.uniform(0.8, 1.0)
            reach = own * 1.18 + 1
            x, y = rng.uniform(reach, width - reach), rng.uniform(reach, height - reach)
            if all(
                math.dist((x, y), other[:2]) > (own + other[2]) * 1.22 + 2 * factor
                for other in placed
            ):
                placed.append((x, y, own))
            if len(placed) == count:
                break
        radius *= 0.93
    for x, y, own in placed:
        draw_shape(pen, shape, (x, y), own, _look(rng), tint)
    return spoil(rng, picture.reduce(factor) if factor > 1 else picture)


def _stamp(rng: random.Random, digits: str, face: str, height: int, level: float) -> Image.Image:
    """Draw the digits as a mask, in one go or one by one at an uneven pitch."""
    letters = font(face, height)
    stroke = rng.choice((0, 0, 1, max(1, height // 22))) if level > 0.3 else 0
    advance = max(letters.getlength(digit) for digit in "0123456789")
    pitch = (
        advance * (1.1 if level <= 0 else rng.uniform(1.1 - 0.12 * level, 1.1 + 0.3 * level))
        + stroke
    )
    mask = Image.new(
        "L",
        (math.ceil(pitch * len(digits)) + 2 * stroke + 4, math.ceil(height * 1.3) + 2 * stroke),
        0,
    )
    pen = ImageDraw.Draw(mask)
    wobble = height * 0.06 * level if rng.random() < 0.3 else 0.0
    for index, digit in enumerate(digits):
        left = stroke + 2 + pitch * index + (pitch - letters.getlength(digit)) / 2
        pen.text(
            (left, height * 0.1 + rng.uniform(-wobble, wobble)),
            digit,
            fill=255,
            font=letters,
            stroke_width=stroke,
        )
    turn = rng.uniform(-9, 9) * level if rng.random() < 0.5 else 0.0
    if abs(turn) > 0.5:
        mask = mask.rotate(turn, Image.Resampling.BICUBIC, expand=True)
    return mask.crop(mask.getbbox())


def draw_number(
    rng: random.Random, size: Size, digits: str, level: float, faces: Sequence[str]
) -> Image.Image:
    """Draw a printed number; `level` 0 is fixed pitch from the left, 1 is anything."""
    ink = rng.choice(
        [shade(rng, colour, 25) for colour in COLOURS.values()] + [(10, 10, 10), (250, 250, 250)]
    )
    face = rng.choice(faces) if faces and level > 0.5 and rng.random() < 0.35 else DEFAULT_FACE
    picture = draw_ground(rng, size, [ink])
    longest = 5 if level <= 0 else len(digits)
    fit = min(size[0] * 0.94 / (0.64 * longest), size[1] * 0.85)
    least = max(fit * 0.42, 20.0 * math.sqrt(size[0] * size[1]) / 224)
    usual = fit * 0.8
    height = (
        usual
        if level <= 0
        else rng.uniform(usual + (min(least, usual) - usual) * level, usual + (fit - usual) * level)
    )
    mask = _stamp(rng, digits, face, max(10, int(height)), level)
    shrink = min(size[0] * 0.98 / mask.width, size[1] * 0.98 / mask.height, 1.0)
    if shrink < 1.0:
        smaller = (max(1, int(mask.width * shrink)), max(1, int(mask.height * shrink)))
        mask = mask.resize(smaller, Image.Resampling.BICUBIC)
    spare = (size[0] - mask.width, size[1] - mask.height)
    left, top = (
        int(room * rest + rng.uniform(-rest, 1 - rest) * room * level)
        for room, rest in zip(spare, (0.03, 0.5), strict=True)
    )
    picture.paste(ink, (left, top), mask)
    return spoil(rng, picture) if level > 0.3 else picture


def draw_plain(rng: random.Random, size: Size, colour: str) -> Image.Image:
    """Draw a picture of one colour."""
    return spoil(rng, Image.new("RGB", size, shade(rng, COLOURS[colour], 14)))


def draw_clip(
    rng: random.Random, size: Size, colour: str, shape: str, direction: str, num_frames: int
) -> list[Image.Image]:
    """Draw one shape moving evenly in a direction."""
    tint = shade(rng, COLOURS[colour], 14)
    factor = _oversampling(rng, size)
    width, height = size[0] * factor, size[1] * factor
    ground = draw_ground(rng, (width, height), [tint])
    radius = min(width, height) * rng.uniform(0.11, 0.24)
    look = _look(rng)
    along_x = direction in ("left", "right")
    spans = (width - 2.4 * radius, height - 2.4 * radius)
    main, side = (spans[0], spans[1]) if along_x else (spans[1], spans[0])
    way = main * rng.uniform(0.45, 0.95)
    drift = rng.uniform(-0.12, 0.12) * min(way, side)
    start = rng.uniform(0, main - way)
    across = rng.uniform(max(0, -drift), side - max(0, drift))
    quality = rng.randint(50, 95) if rng.random() < 0.4 else None
    frames = []
    for index in range(num_frames):
        share = index / (num_frames - 1)
        forward = start + way * (share if direction in ("right", "down") else 1 - share)
        place = (forward, across + drift * share) if along_x else (across + drift * share, forward)
        frame = ground.copy()
        draw_shape(
            ImageDraw.Draw(frame),
            shape,
            (place[0] + 1.2 * radius, place[1] + 1.2 * radius),
            radius,
            look,
            tint,
        )
        frame = frame.reduce(factor) if factor > 1 else frame
        if quality is not None:
            buffer = io.BytesIO()
            frame.save(buffer, format="JPEG", quality=quality)
            frame = Image.open(buffer).convert("RGB")
        frames.append(frame)
    return frames
