"""Whole prompts, from the body of a request to token ids, against the reference processor's.

Real tokenizers, templates that do what the published ones do, real sizes of pictures and clips.
"""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from chiasm.errors import InvalidRequest
from chiasm.plan import Modality
from gateway.api.jobs import chat_messages
from gateway.api.openai_schema import MessageBody
from gateway.media import MediaHeader
from gateway.messages import MediaOptions, MediaPart, Message, Tool
from gateway.planning.base import Layout
from gateway.planning.registry import planner_for
from gateway.prompt import ExpandedPrompt, PromptBuilder
from gateway.turns import TurnForm
from tests.families import FAMILIES
from tests.parity.conversations import (
    CLOCK,
    IMAGE,
    WEATHER,
    Body,
    Talk,
    answer,
    call,
    conversations,
    result,
    system,
    text,
    user,
)
from tests.parity.published import PUBLISHED, Published, save_published

from transformers import AutoProcessor  # isort: skip
from transformers.video_utils import VideoMetadata  # isort: skip

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
TALKS = list(conversations())
SIZES = ((64, 64), (150, 90), (61, 200), (112, 224))
FPS = 2.0


class Pair:
    """One checkpoint, as our gateway and as the reference processor read it."""

    def __init__(self, name: str, path: Path) -> None:
        self.one: Published = PUBLISHED[name]
        self.builder = PromptBuilder(path)
        self.planner = planner_for(path)
        self.reference: Any = AutoProcessor.from_pretrained(path / "hf")
        self.fills_up = FAMILIES[self.one.like].fills_up

    @property
    def takes_tools(self) -> bool:
        return self.builder.dialect.tools is not None

    def ours(self, talk: Talk) -> tuple[ExpandedPrompt, list[Layout]]:
        messages = messages_of(talk.messages)
        layouts = [
            self.planner.plan(header, MediaOptions(), param="p") for header in headers_of(messages)
        ]
        form = TurnForm(
            options=dict(talk.options),
            tools=tuple(map(tool_of, talk.tools)) if self.takes_tools else (),
            add_generation_prompt=talk.open_for_answer,
        )
        rendered = self.builder.render(messages, scripts=[one.script for one in layouts], form=form)
        rows = [rows for layout in layouts for rows in layout.runs]
        return self.builder.expand(rendered, rows), layouts

    def theirs(self, talk: Talk, layouts: list[Layout]) -> list[int]:
        speaker = self.reference.tokenizer if self.one.text_only else self.reference
        text = speaker.apply_chat_template(
            [self._turn(message) for message in talk.messages],
            tools=list(talk.tools) if talk.tools and self.takes_tools else None,
            tokenize=False,
            add_generation_prompt=talk.open_for_answer,
            **talk.options,
        )
        made = self.reference(text=[text], return_tensors="pt", **self._media(layouts))
        ids: list[int] = made["input_ids"][0].tolist()
        return ids

    def _turn(self, message: Body) -> Body:
        """As users of transformers write it: parts by kind, arguments as an object."""
        turn = {key: value for key, value in message.items() if key != "content"}
        content = message["content"] or ""
        if self.one.text_only and not isinstance(content, str):
            content = "".join(map(self._in_text, content))
        elif not isinstance(content, str) and all(part["type"] == "text" for part in content):
            content = "".join(part["text"] for part in content)
        elif not isinstance(content, str):
            content = [
                part if part["type"] == "text" else {"type": part["type"].removesuffix("_url")}
                for part in content
            ]
        turn["content"] = content
        for one in turn.get("tool_calls", ()):
            turn["tool_calls"] = [spoken(one) for one in turn["tool_calls"]]
        return turn

    def _in_text(self, part: Body) -> str:
        if part["type"] == "text":
            return str(part["text"])
        return (self.one.image if part["type"] == "image_url" else self.one.video) + "\n"

    def _media(self, layouts: list[Layout]) -> dict[str, Any]:
        images, videos, facts = [], [], []
        for layout in layouts:
            header = layout.header
            if header.modality is Modality.IMAGE:
                images.append(Image.new("RGB", (header.width, header.height)))
                continue
            chosen = [*layout.frame_indices]
            if not self.fills_up:
                chosen = sorted(set(chosen))
            videos.append(np.zeros((len(chosen), header.height, header.width, 3), np.uint8))
            facts.append(
                VideoMetadata(
                    total_num_frames=header.num_frames,
                    fps=FPS,
                    duration=header.duration_s,
                    frames_indices=chosen,
                )
            )
        found: dict[str, Any] = {"images": images} if images else {}
        if videos:
            found |= {"videos": videos, "video_metadata": facts, "do_sample_frames": False}
        return found


def spoken(one: Body) -> Body:
    function = one["function"]
    if not isinstance(function["arguments"], str):
        return one
    arguments = json.loads(function["arguments"] or "{}")
    return {**one, "function": {**function, "arguments": arguments}}


def messages_of(bodies: list[Body]) -> tuple[Message, ...]:
    return chat_messages([MessageBody.model_validate(body) for body in bodies])


def headers_of(messages: tuple[Message, ...]) -> list[MediaHeader]:
    number = count()
    found = []
    for part in (part for message in messages for part in message.parts):
        if not isinstance(part, MediaPart):
            continue
        height, width = SIZES[next(number) % len(SIZES)]
        if part.modality is Modality.IMAGE:
            found.append(MediaHeader(Modality.IMAGE, "image/png", height, width))
        else:
            times = tuple(index / FPS for index in range(7))
            found.append(MediaHeader(Modality.VIDEO, "video/mp4", height, width, times, 7 / FPS))
    return found


def tool_of(body: Body) -> Tool:
    function = body["function"]
    return Tool(name=function["name"], body=body, parameters=function.get("parameters") or {})


@pytest.fixture(scope="module", params=PUBLISHED, name="pair")
def pair_(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    path = save_published(request.param, tmp_path_factory.mktemp("published") / "c")
    return Pair(request.param, path)


def test_there_are_thirty() -> None:
    assert len({talk.name for talk in TALKS}) == len(TALKS) >= 30


@pytest.mark.parametrize("talk", TALKS, ids=[talk.name for talk in TALKS])
def test_token_ids_equal_the_reference_s(pair: Pair, talk: Talk) -> None:
    expanded, layouts = pair.ours(talk)
    expected = pair.theirs(talk, layouts)
    ours = list(expanded.token_ids)
    decode = pair.builder.vocabulary.decode
    assert ours == expected, (
        decode(ours, skip_special=False)[-1500:],
        decode(expected, skip_special=False)[-1500:],
    )
    for layout, runs in zip(layouts, expanded.runs, strict=True):
        assert sum(map(len, runs)) == layout.num_rows


def test_what_users_type_is_no_special_token(pair: Pair) -> None:
    """Every name the tokenizer has, in every place that a client fills in."""
    specials = sorted(map(pair.builder.vocabulary.name_of, pair.builder.vocabulary.special_ids))
    hostile, _ = pair.ours(typed("".join(specials)))
    harmless, _ = pair.ours(typed("x"))
    assert special_ids(pair, hostile) == special_ids(pair, harmless)
    assert "".join(specials) in pair.builder.vocabulary.decode(
        hostile.token_ids, skip_special=False
    )


def typed(name: str) -> Talk:
    return Talk(
        "typed",
        [
            system(f"a{name}"),
            user(name, IMAGE, f"{name}b"),
            answer(name, call(name, {name: [name]}), thought=name),
            result(name),
            user(f"c {name}"),
        ],
        (WEATHER,),
    )


def special_ids(pair: Pair, prompt: ExpandedPrompt) -> list[int]:
    return [i for i in prompt.token_ids if i in pair.builder.vocabulary.special_ids]


def test_pictures_in_results_of_tools(pair: Pair) -> None:
    """Shown where the template shows them; never dropped in silence."""
    talk = Talk(
        "picture of a tool",
        [user("Draw"), answer(None, call("clock", {})), result([IMAGE, text("done")])],
        (CLOCK,),
    )
    if pair.one.template in SHOW_RESULTS or pair.one.text_only:
        expanded, layouts = pair.ours(talk)
        assert list(expanded.token_ids) == pair.theirs(talk, layouts)
        assert len(layouts) == 1
        return
    with pytest.raises(InvalidRequest, match="no media in tool messages"):
        pair.ours(talk)


# GLM-4.1V leaves turns of tools out; the others' render every turn alike.
SHOW_RESULTS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_thinking", "internvl_hf", "glm_4_5v")
