"""The shape of chat answers, over a scripted pipeline."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from chiasm.plan import Modality
from gateway.messages import (
    ChatJob,
    ChoiceDone,
    Delta,
    FinishReason,
    Job,
    JobDone,
    MediaOptions,
    MediaPart,
    Role,
    TextPart,
    TokenLogprob,
)
from tests.unit.gateway_face.scripted import (
    CHAT,
    COMPLETIONS,
    TIMINGS,
    USAGE,
    USAGE_BODY,
    ScriptedPipeline,
    chat,
    events_of,
)


async def test_a_whole_answer(client: httpx.AsyncClient) -> None:
    answer = await client.post(CHAT, json=chat(), headers={"x-request-id": "my-id"})
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == "my-id"
    body = answer.json()
    assert body["id"].startswith("chatcmpl-my-id")
    assert body["object"] == "chat.completion"
    assert body["model"] == "demo"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "red circle", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"] == USAGE_BODY
    assert "timings" not in body


async def test_a_stream_says_the_same(client: httpx.AsyncClient) -> None:
    answer = await client.post(CHAT, json=chat(stream=True, n=2))
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    chunks = events_of(answer)
    assert len({chunk["id"] for chunk in chunks}) == 1
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": "red"}
        assert "role" not in mine[1]["delta"]
        assert "".join(c["delta"].get("content", "") for c in mine) == "red circle"
        assert [c["finish_reason"] for c in mine] == [None, None, "stop"]
    assert all(c["object"] == "chat.completion.chunk" and "usage" not in c for c in chunks)


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
async def test_the_usage_chunk_comes_only_when_asked_for(
    client: httpx.AsyncClient, url: str
) -> None:
    body = {"model": "demo", "messages": chat()["messages"], "prompt": "x", "stream": True}
    for options in (None, {}, {"include_usage": False}, {"include_usage": None}):
        chunks = events_of(await client.post(url, json={**body, "stream_options": options}))
        assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)
    asked = await client.post(url, json={**body, "stream_options": {"include_usage": True}})
    *chunks, last = events_of(asked)
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == USAGE_BODY


async def test_timings_come_when_asked_for(client: httpx.AsyncClient) -> None:
    whole = await client.post(CHAT, json=chat(return_timings=True))
    assert whole.json()["timings"]["first_token"] == TIMINGS.first_token
    chunks = events_of(await client.post(CHAT, json=chat(stream=True, return_timings=True, n=2)))
    assert [c["choices"][0]["finish_reason"] for c in chunks[-2:]] == ["stop", "stop"]
    assert ["timings" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    options = {"include_usage": True}
    chunks = events_of(
        await client.post(CHAT, json=chat(stream=True, stream_options=options, return_timings=True))
    )
    assert chunks[-1]["timings"]["fetch"] == TIMINGS.fetch
    assert chunks[-1]["usage"] == USAGE_BODY


async def test_a_choice_that_says_nothing_still_has_a_role_and_an_end(
    pipeline: ScriptedPipeline, client: httpx.AsyncClient
) -> None:
    pipeline.words = ()
    (chunk,) = events_of(await client.post(CHAT, json=chat(stream=True)))
    assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunk["choices"][0]["finish_reason"] == "stop"


async def test_logprobs(pipeline: ScriptedPipeline, client: httpx.AsyncClient) -> None:
    token = 65 - 33  # "A" in the demo's byte-level vocabulary
    logprob = TokenLogprob(token, -0.5, ((token, -0.5), (token + 1, float("-inf"))))

    def events(job: Job) -> list:
        delta = Delta(0, "A", (token,), (logprob,))
        return [delta, ChoiceDone(0, FinishReason.LENGTH), JobDone(USAGE, TIMINGS)]

    pipeline.make_events = events
    answer = await client.post(CHAT, json=chat(logprobs=True, top_logprobs=2))
    content = answer.json()["choices"][0]["logprobs"]["content"]
    assert content[0]["token"] == "A"
    assert content[0]["bytes"] == [65]
    assert [t["logprob"] for t in content[0]["top_logprobs"]] == [-0.5, -9999.0]
    job = pipeline.jobs[-1]
    assert job.sampling.top_logprobs == 2
    (chunk, _) = events_of(await client.post(CHAT, json=chat(logprobs=True, stream=True)))
    assert chunk["choices"][0]["logprobs"]["content"][0]["logprob"] == -0.5
    assert pipeline.jobs[-1].sampling.top_logprobs == 0
    answer = await client.post(COMPLETIONS, json={"model": "demo", "prompt": "x", "logprobs": 2})
    assert answer.json()["choices"][0]["logprobs"] == {
        "tokens": ["A"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"A": -0.5, "B": -9999.0}],
        "text_offset": [0],
    }


async def test_turns_as_the_pipeline_gets_them(
    client: httpx.AsyncClient, pipeline: ScriptedPipeline
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": "data:,a"},
                {"type": "image_url", "image_url": {"url": "data:,b", "detail": "low"}},
                {"type": "video_url", "video_url": {"url": "data:,c"}},
                {"type": "text", "text": ""},
            ],
        },
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "4"}], "tool_call_id": "c"},
    ]
    answer = await client.post(CHAT, json={"model": "demo", "messages": messages, "unknown": 1})
    assert answer.status_code == 200, answer.text
    job = pipeline.jobs[-1]
    assert isinstance(job, ChatJob)
    assert [m.role for m in job.messages] == [Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.TOOL]
    assert job.messages[1].parts == (
        MediaPart(Modality.IMAGE, url="data:,a", param="messages[1].content[0]"),
        MediaPart(
            Modality.IMAGE,
            url="data:,b",
            param="messages[1].content[1]",
            options=MediaOptions(max_pixels=512 * 512),
        ),
        MediaPart(Modality.VIDEO, url="data:,c", param="messages[1].content[2]"),
        TextPart(""),
    )
    assert job.messages[2].parts == ()
    assert job.messages[2].tool_calls[0].arguments == "{}"
    assert job.messages[3].tool_call_id == "c"


async def test_whole_answers_close_their_run(
    client: httpx.AsyncClient, pipeline: ScriptedPipeline
) -> None:
    pipeline.hold_first = asyncio.Event()
    request = asyncio.create_task(client.post(CHAT, json=chat()))
    while not pipeline.held:
        await asyncio.sleep(0.001)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    assert pipeline.ends == ["cancelled"]
