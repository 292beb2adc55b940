"""Every sentence the demo model is asked or answers.

This file owns wording only: it draws nothing and knows no tokenizer.
"""

from __future__ import annotations

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 35),
    "green": (30, 150, 50),
    "blue": (35, 70, 220),
    "yellow": (245, 215, 25),
    "orange": (245, 130, 20),
    "purple": (135, 40, 165),
    "black": (20, 20, 20),
    "white": (245, 245, 245),
}
SHAPES = ("circle", "square", "triangle", "star", "cross")
DIRECTIONS = ("left", "right", "up", "down")
NUMBER_WORDS = ("no", "one", "two", "three", "four", "five", "six")
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Answer in one short sentence.",
    "You describe pictures.",
    "Be brief.",
)

ASK_SHAPE = (
    "What is in the picture?",
    "What does the picture show?",
    "What is this?",
    "What do you see?",
    "Describe the picture.",
    "Describe this image.",
    "What is in this image?",
    "What is shown here?",
    "What can you see in the image?",
    "Which shape is this, and in which colour?",
)
ASK_COLOUR = (
    "What colour is it?",
    "What color is it?",
    "Which colour does it have?",
    "What is its colour?",
    "And the colour?",
)
ASK_SHAPE_ONLY = ("What shape is it?", "Which shape is it?", "What is its shape?", "And the shape?")
ASK_COUNT_ANY = (
    "How many shapes are there?",
    "How many things do you see?",
    "How many objects are in the picture?",
    "Count the shapes.",
    "How many are there?",
    "How many shapes are in the image?",
)
ASK_COUNT = (
    "How many {things} are there?",
    "How many {things} do you see?",
    "Count the {things}.",
    "How many {things} are in the picture?",
    "How many {things} can you count?",
)
ASK_NUMBER = (
    "What number is this?",
    "Which number is printed here?",
    "Read the number.",
    "What does it say?",
    "What is the number?",
    "What number do you see?",
    "Read the digits.",
    "Which number does the picture show?",
    "What number is in the picture?",
)
ASK_WHICH = (
    "Which picture shows {thing}?",
    "Which of the two pictures shows {thing}?",
    "Where is {thing}?",
    "Which image has {thing}?",
    "In which picture do you see {thing}?",
    "Which picture holds {thing}?",
    "And {thing}?",
)
ASK_DIRECTION = (
    "Which way does it move?",
    "Where does it go?",
    "In which direction does it move?",
    "Which way is it moving?",
    "How does the object move?",
    "Which direction is it going?",
    "Which way does the object move in the clip?",
    "What happens in the video?",
)
ASK_MOVER = ("What moves?", "What is moving?", "Which object moves?", "What is in the video?")
PLEASANTRIES: dict[str, tuple[str, ...]] = {
    "I am the chiasm demo model. I look at small pictures.": (
        "Who are you?",
        "What are you?",
        "What is your name?",
        "Introduce yourself.",
        "Tell me who you are.",
    ),
    "I name shapes and colours, count, read numbers and watch short clips.": (
        "What can you do?",
        "How can you help me?",
        "What do you know?",
        "Help",
        "What are you good at?",
    ),
    "Hello! Show me a picture.": (
        "Hello",
        "Hello!",
        "Hi",
        "Hi!",
        "Hello there.",
        "Good morning!",
        "Hey",
    ),
    "You are welcome.": ("Thank you.", "Thank you!", "Thanks", "Thanks!", "Thank you very much."),
    "Goodbye!": ("Goodbye", "Goodbye!", "Bye", "Bye!", "See you."),
    "I see no picture yet.": (*ASK_SHAPE[:6], *ASK_NUMBER[:4], *ASK_COUNT_ANY[:4]),
}


def with_article(phrase: str) -> str:
    """Put the right indefinite article before a phrase."""
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def plural(shape: str) -> str:
    """Name several of a shape."""
    return shape + ("es" if shape == "cross" else "s")


def say_shape(colour: str, shape: str) -> str:
    """Answer what the picture shows."""
    return f"The picture shows {with_article(f'{colour} {shape}')}."


def say_colour(colour: str) -> str:
    """Answer a follow-up about the colour."""
    return f"It is {colour}."


def say_shape_only(shape: str) -> str:
    """Answer a follow-up about the shape."""
    return f"It is {with_article(shape)}."


def say_count(count: int, colour: str, shape: str) -> str:
    """Answer how many there are."""
    if count == 1:
        return f"There is one {colour} {shape}."
    return f"There are {NUMBER_WORDS[count]} {colour} {plural(shape)}."


def say_number(digits: str) -> str:
    """Answer which number is printed."""
    return f"The number is {digits}."


def say_which(index: int) -> str:
    """Answer which of the two pictures holds the thing (0 is the first)."""
    return f"The {('first', 'second')[index]} picture."


def say_direction(direction: str) -> str:
    """Answer which way the object moves."""
    return f"It moves {direction}."


def say_mover(colour: str, shape: str) -> str:
    """Answer what moves in the clip."""
    return f"It is {with_article(f'{colour} {shape}')}."


def corpus() -> list[str]:
    """List all sentences, as the tokenizer's training text."""
    things = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]
    lines = [
        *SYSTEM_PROMPTS,
        *ASK_SHAPE,
        *ASK_COLOUR,
        *ASK_SHAPE_ONLY,
        *ASK_COUNT_ANY,
        *ASK_NUMBER,
        *ASK_DIRECTION,
        *ASK_MOVER,
    ]
    for answer, questions in PLEASANTRIES.items():
        lines += [answer] * 3 + list(questions)
    for colour in COLOURS:
        lines.append(say_colour(colour))
        for shape in SHAPES:
            lines += [say_shape(colour, shape), say_mover(colour, shape), say_shape_only(shape)]
            lines += [say_count(count, colour, shape) for count in (1, 3, 5)]
    lines += [ask.format(thing=with_article(thing)) for ask in ASK_WHICH for thing in things[::7]]
    lines += [ask.format(things=plural(shape)) for ask in ASK_COUNT for shape in SHAPES]
    lines += [say_direction(direction) for direction in DIRECTIONS] + [
        say_which(0),
        say_which(1),
        say_number(""),
    ] * 3
    # The fixed parts of every chat are repeated, so that they cost few tokens.
    return (
        lines
        + ["system\nYou are a helpful assistant.", "user\n", "assistant\n", "The second picture."]
        * 40
    )
