"""Conversations as clients of the OpenAI API send them, one for each way that prompts go wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]
IMAGE: Body = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
VIDEO: Body = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}}

WEATHER: Body = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a <place> & its süden, 天气",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["place"],
        },
    },
}
CLOCK: Body = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}


@dataclass(frozen=True, slots=True)
class Talk:
    """One conversation."""

    name: str
    messages: list[Body]
    tools: tuple[Body, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the template."""
    open_for_answer: bool = True


def text(words: str) -> Body:
    return {"type": "text", "text": words}


def system(content: str | list[Body]) -> Body:
    return {"role": "system", "content": content}


def user(*content: str | Body) -> Body:
    if len(content) == 1 and isinstance(content[0], str):
        return {"role": "user", "content": content[0]}
    parts = [text(part) if isinstance(part, str) else part for part in content]
    return {"role": "user", "content": parts}


def answer(content: str | None, *calls: Body, thought: str | None = None) -> Body:
    made: Body = {"role": "assistant", "content": content}
    if calls:
        made["tool_calls"] = list(calls)
    if thought is not None:
        made["reasoning_content"] = thought
    return made


def call(name: str, arguments: Mapping[str, Any] | None, number: int = 1) -> Body:
    """Arguments are JSON text, as models wrote them; some clients send none at all."""
    written = "" if arguments is None else json.dumps(arguments, ensure_ascii=False)
    function = {"name": name, "arguments": written}
    return {"type": "function", "id": f"call_{number}", "function": function}


def result(content: str | list[Body], number: int = 1) -> Body:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": content}


NESTED = {
    "place": 'Zürich "HB"\n漢字',
    "days": 3,
    "more": {"list": [1, 2.5, None, True], "slash": "a/b\\c"},
}


def conversations() -> Iterator[Talk]:
    """All of them."""
    yield from _plain()
    yield from _with_media()
    yield from _with_tools()
    yield from _with_thoughts()


def _plain() -> Iterator[Talk]:
    yield Talk("a question", [user("What is a heron?")])
    yield Talk("system", [system("Be brief."), user("What is a heron?")])
    yield Talk(
        "turns", [user("Hi"), answer("Hello!"), user("How are you?"), answer("Fine."), user("Good")]
    )
    yield Talk("system in parts", [system([text("Be "), text("brief.")]), user("Go on")])
    yield Talk("text in parts", [user("One, ", "two", ", three")])
    yield Talk("empty", [user("")])
    yield Talk(
        "blanks", [system("\n"), user("  two\n\n\tthree \n"), answer(" \n"), user("\nend\n\n")]
    )
    yield Talk(
        "languages",
        [user("Grüße, 你好世界 🙂👩‍👧 naïve №5 １２３ 1234567 ﬁ"), answer("はい"), user("ok")],
    )
    yield Talk("code", [user("{{ user }} {% if x %} {# no #} <b>&amp;</b> \\n `a['b']`")])
    yield Talk("almost special", [user("<|im_start <|im_end| im_end|> <| |> <im_end> [gMASK <img")])
    yield Talk("no turn opened", [user("Hi"), answer("Hello")], open_for_answer=False)
    yield Talk(
        "two questions running", [user("First"), user("Second"), answer("Both."), user("Third")]
    )


def _with_media() -> Iterator[Talk]:
    yield Talk("a picture", [user(IMAGE, "What is this?")])
    yield Talk("a picture alone", [user(IMAGE)])
    yield Talk("text around a picture", [user("Here:", IMAGE, "\nWhat is it?")])
    yield Talk("three pictures", [user(IMAGE, IMAGE, "and", IMAGE, "differ how?")])
    yield Talk(
        "pictures over turns",
        [
            system("Look."),
            user(IMAGE, "This?"),
            answer("A cat."),
            user("And", IMAGE),
            answer("A dog."),
            user("Sure?"),
        ],
    )
    yield Talk("a clip", [user(VIDEO, "What happens?")])
    yield Talk("a clip between pictures", [user(IMAGE, VIDEO, "then", IMAGE, "Compare.")])
    yield Talk("two clips", [user("1.", VIDEO), answer("ok"), user("2.", VIDEO, "Same?")])
    yield Talk(
        "numbered media",
        [user(IMAGE, IMAGE, VIDEO, "Picture 2?"), answer("A hat."), user(IMAGE, "Picture 3?")],
        options={"add_vision_id": True},
    )


def _with_tools() -> Iterator[Talk]:
    yield Talk("tools offered", [user("Weather in Rome?")], (WEATHER, CLOCK))
    yield Talk(
        "tools and system", [system("Use tools."), user(IMAGE, "Weather there?")], (WEATHER,)
    )
    yield Talk(
        "a call and its result",
        [
            user("Weather?"),
            answer(None, call("get_weather", {"place": "Rome"})),
            result('{"sky": "clear"}'),
        ],
        (WEATHER,),
    )
    yield Talk(
        "text before a call, and after it",
        [
            user("Weather?"),
            answer("I look.", call("get_weather", NESTED)),
            result("clear"),
            answer("It is clear."),
            user("Thanks"),
        ],
        (WEATHER,),
    )
    yield Talk(
        "two calls",
        [
            user("Weather and time?"),
            answer("", call("get_weather", {"place": "a", "days": 2}), call("clock", {}, 2)),
            result("clear"),
            result("12:00", 2),
        ],
        (WEATHER, CLOCK),
    )
    yield Talk(
        "a call without arguments",
        [user("Time?"), answer(None, call("clock", None)), result([text("12"), text(":00")])],
        (CLOCK,),
    )
    yield Talk(
        "call after call",
        [
            user("Time?"),
            answer(None, call("clock", {}), thought="I need the clock."),
            result("12:00"),
            answer(
                "Now the weather.", call("get_weather", {"place": "x"}, 2), thought="\nAnd now?\n"
            ),
            result("rain", 2),
        ],
        (WEATHER, CLOCK),
    )


def _with_thoughts() -> Iterator[Talk]:
    yield Talk(
        "a thought of an earlier turn",
        [user("Hi"), answer("Hello", thought="A greeting."), user("Bye")],
    )
    yield Talk(
        "a thought in the text", [user("Hi"), answer("<think>\nhm\n</think>\n\nHello"), user("Bye")]
    )
    yield Talk(
        "an open thought", [user("Hi"), answer("Hello", thought="hm")], open_for_answer=False
    )
    yield Talk(
        "no thinking",
        [user("Hi"), answer("Hello"), user(IMAGE, "And?")],
        options={"enable_thinking": False},
    )
    yield Talk("no thinking, said twice", [user("Hi /nothink")], options={"enable_thinking": False})
