"""The unmodified OpenAI SDK against the running system."""

from __future__ import annotations

import openai
import pytest
from openai import OpenAI

from tests.integration.media import circle, clip, data_uri, image_part, text_part

MODEL = "demo"


def ask(client: OpenAI, *parts: dict[str, object], **options: object) -> str:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": list(parts)}],
        temperature=0,
        max_tokens=32,
        **options,
    )
    return answer.choices[0].message.content


def test_a_picture_is_answered_rightly(client: OpenAI) -> None:
    answer = ask(client, image_part(circle("red")), text_part("What is in the picture?"))
    assert "red" in answer and "circle" in answer


def test_two_pictures_are_both_seen(client: OpenAI) -> None:
    messages = [
        {
            "role": "user",
            "content": [
                image_part(circle("red")),
                image_part(circle("blue")),
                text_part("What is in the picture?"),
            ],
        }
    ]
    both = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=8
    )
    messages[0]["content"] = messages[0]["content"][:1] + messages[0]["content"][2:]
    one = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=8
    )
    per_picture = both.usage.prompt_tokens - one.usage.prompt_tokens
    assert per_picture == 64 + 2  # 224 x 224 is 16 x 16 patches, merged 2 x 2, between two marks


def test_a_clip_is_answered(client: OpenAI) -> None:
    part = {"type": "video_url", "video_url": {"url": data_uri(clip(), "video/mp4")}}
    assert ask(client, part, text_part("Which way does the object move?"))


def test_a_chat_of_several_turns(client: OpenAI) -> None:
    messages: list[dict[str, object]] = []
    grown = []
    for colour in ("red", "blue"):
        messages.append(
            {
                "role": "user",
                "content": [image_part(circle(colour)), text_part("What is in the picture?")],
            }
        )
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=32
        )
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        grown.append(answer.usage.prompt_tokens)
        assert answer.choices[0].finish_reason == "stop"
    assert grown[1] > grown[0] + 64


def test_a_stream_equals_the_whole_and_ends_with_usage(client: OpenAI) -> None:
    messages = [
        {
            "role": "user",
            "content": [image_part(circle("green")), text_part("What is in the picture?")],
        }
    ]
    options = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 32}
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"


def test_the_model_list_names_what_is_served(client: OpenAI) -> None:
    assert MODEL in [model.id for model in client.models.list()]


def test_a_wrong_model_is_404(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "hi"}])
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
def test_a_broken_picture_is_400_before_any_byte_of_a_stream(client: OpenAI, stream: bool) -> None:
    whole = image_part(circle())
    broken = dict(whole, image_url={"url": whole["image_url"]["url"][:-400]})
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL,
            messages=[
                {"role": "user", "content": [whole, broken, text_part("What is in the picture?")]}
            ],
            stream=stream,
        )
    assert "messages[0].content[1]" in str(caught.value.body)
    answer = ask(client, image_part(circle("red")), text_part("What is in the picture?"))
    assert "red" in answer


def test_timings_come_when_asked_for(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[
            {
                "role": "user",
                "content": [image_part(circle()), text_part("What is in the picture?")],
            }
        ],
        max_tokens=4,
        extra_body={"return_timings": True},
    )
    timings = answer.model_extra["timings"]
    assert set(timings) >= {"fetch", "plan", "queue", "encode", "transfer", "prefill", "decode"}
    assert timings["first_token"] > 0
