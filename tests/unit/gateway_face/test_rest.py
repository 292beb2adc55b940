"""C04, C10, C11 and the shape of answers, over a scripted pipeline."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import orjson
import pytest

from chiasm.errors import (
    ChiasmError,
    InvalidMedia,
    ResourceExhausted,
    Unavailable,
    all_errors,
)
from chiasm.plan import Modality
from gateway.api.body import MAX_DEPTH
from gateway.messages import (
    ChatJob,
    ChoiceDone,
    Delta,
    FinishReason,
    Job,
    JobDone,
    MediaPart,
    RawJob,
    Readiness,
    Role,
    TextPart,
    TokenLogprob,
)
from tests.unit.gateway_face.scripted import (
    TIMINGS,
    USAGE,
    ScriptedPipeline,
    chat,
    client_of,
    make_face,
)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USAGE_BODY = {
    "prompt_tokens": 11,
    "completion_tokens": 3,
    "total_tokens": 14,
    "prompt_tokens_details": {"cached_tokens": 4},
}


@pytest.fixture
def pipeline() -> ScriptedPipeline:
    return ScriptedPipeline()


@pytest.fixture
async def client(pipeline: ScriptedPipeline) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(make_face(pipeline)) as found:
        yield found


def events_of(answer: httpx.Response) -> list[dict]:
    """The JSON of every event; checks the terminator."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    frames = answer.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


def check_error(answer: httpx.Response, status: int, code: str, param: str | None = None) -> str:
    assert answer.status_code == status, answer.text
    assert answer.headers["x-request-id"]
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == code
    assert body["error"]["param"] == param
    message: str = body["error"]["message"]
    assert message
    assert "Traceback" not in message
    return message


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


@pytest.mark.parametrize("cls", sorted(set(all_errors().values()), key=lambda c: c.__name__))
async def test_errors_before_the_first_event_are_plain_statuses(
    pipeline: ScriptedPipeline, client: httpx.AsyncClient, cls: type[ChiasmError]
) -> None:
    pipeline.fail_first = cls("what went wrong", param="messages[0]")
    for stream in (False, True):
        answer = await client.post(CHAT, json=chat(stream=stream))
        check_error(answer, cls.http_status, cls.code, "messages[0]")


async def test_retry_after_is_said(pipeline: ScriptedPipeline, client: httpx.AsyncClient) -> None:
    pipeline.fail_first = ResourceExhausted("full", retry_after_s=2.1)
    assert (await client.post(CHAT, json=chat())).headers["retry-after"] == "3"
    pipeline.fail_first = Unavailable("gone")
    assert (await client.post(CHAT, json=chat())).headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidMedia("cut off", param="messages[0].content[0]"), "invalid_media"),
        (RuntimeError("secret"), "internal_error"),
    ],
)
async def test_errors_in_a_stream_are_its_last_event(
    pipeline: ScriptedPipeline, client: httpx.AsyncClient, error: Exception, code: str
) -> None:
    pipeline.fail_after = (1, error)
    answer = await client.post(CHAT, json=chat(stream=True))
    assert answer.status_code == 200
    first, last = events_of(answer)
    assert first["choices"][0]["delta"]["content"] == "red"
    assert last["error"]["code"] == code
    assert "secret" not in answer.text
    whole = await client.post(CHAT, json=chat())
    assert whole.status_code == (400 if code == "invalid_media" else 500)
    assert "secret" not in whole.text


DEEP = "[" * 10_000 + "]" * 10_000
BAD_BODIES = {
    "broken": b'{"model": "demo", "messages": [',
    "empty": b"",
    "spaces": b" \n ",
    "array": b"[]",
    "string": b'"x"',
    "nan": b'{"model": "demo", "temperature": NaN, "messages": [{"role":"user","content":"x"}]}',
    "infinite": b'{"model":"demo","temperature":1e999,"messages":[{"role":"user","content":"x"}]}',
    "surrogate": b'{"model": "demo", "messages": [{"role":"user","content":"\\ud800"}]}',
    "not utf-8": b'{"model": "demo", "messages": [{"role":"user","content":"\xff"}]}',
    "deep": b'{"model": "demo", "messages": ' + DEEP.encode() + b"}",
    "deep unknown": b'{"model": "demo", "x": ' + b"[" * 500 + b"]" * 500 + b"}",
}


@pytest.mark.parametrize("name", BAD_BODIES)
@pytest.mark.parametrize("url", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
async def test_malformed_bodies(client: httpx.AsyncClient, url: str, name: str) -> None:
    headers = {"content-type": "application/json"}
    answer = await client.post(url, content=BAD_BODIES[name], headers=headers)
    assert answer.status_code == 400, answer.text
    check_error(answer, 400, "invalid_request", answer.json()["error"]["param"])


async def test_nesting_within_the_limit_passes(client: httpx.AsyncClient) -> None:
    depth = MAX_DEPTH - 1
    raw = orjson.dumps(chat())[:-1] + b', "metadata": ' + b"[" * depth + b"]" * depth + b"}"
    headers = {"content-type": "application/json"}
    assert (await client.post(CHAT, content=raw, headers=headers)).status_code == 200


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded"])
async def test_other_content_types_are_415(client: httpx.AsyncClient, content_type: str) -> None:
    headers = {"content-type": content_type}
    answer = await client.post(CHAT, content=orjson.dumps(chat()), headers=headers)
    check_error(answer, 415, "unsupported_media_type")


async def test_compressed_bodies_are_415(client: httpx.AsyncClient) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = await client.post(CHAT, content=b"x", headers=headers)
    check_error(answer, 415, "unsupported_media_type")


async def test_large_bodies_are_parsed_and_too_large_ones_are_413(
    pipeline: ScriptedPipeline,
) -> None:
    url = "data:image/png;base64," + "A" * 100_000
    part = {"type": "image_url", "image_url": {"url": url}}
    async with client_of(make_face(pipeline, max_body=200_000)) as client:
        assert (await client.post(CHAT, json=chat([part]))).status_code == 200
        (got,) = pipeline.jobs[-1].messages[0].parts  # type: ignore[union-attr]
        assert got == MediaPart(Modality.IMAGE, url=url, param="messages[0].content[0]")
        check_error(await client.post(CHAT, json=chat([part, part])), 413, "too_large")

        async def unannounced() -> AsyncIterator[bytes]:
            for _ in range(5):
                yield b" " * 50_000

        headers = {"content-type": "application/json"}
        answer = await client.post(CHAT, content=unannounced(), headers=headers)
        check_error(answer, 413, "too_large")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nope", 404, "not_found"),
        ("GET", "/v1/chat/completions/", 404, "not_found"),
        ("GET", "//v1/models", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("OPTIONS", CHAT, 405, "method_not_allowed"),
    ],
)
async def test_unknown_routes_and_methods(
    client: httpx.AsyncClient, method: str, path: str, status: int, code: str
) -> None:
    check_error(await client.request(method, "http://gateway" + path), status, code)


async def test_models(client: httpx.AsyncClient, pipeline: ScriptedPipeline) -> None:
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == list(pipeline.names)
    for model in listed["data"]:
        assert (await client.get(f"/v1/models/{model['id']}")).json() == model
        assert (await client.post(CHAT, json=chat() | {"model": model["id"]})).status_code == 200
    check_error(await client.get("/v1/models/other"), 404, "model_not_found", "model")
    answer = await client.post(CHAT, json=chat() | {"model": "other"})
    check_error(answer, 404, "model_not_found", "model")


async def test_ready_follows_the_pipeline(
    client: httpx.AsyncClient, pipeline: ScriptedPipeline
) -> None:
    answer = await client.get("/ready")
    assert answer.status_code == 200
    assert answer.json()["endpoints"] == [{"role": "decoder", "address": "d:1"}]
    pipeline.ready = Readiness(True, False)
    answer = await client.get("/ready")
    assert (answer.status_code, answer.json()["images"]) == (200, False)
    pipeline.ready = Readiness(False, False)
    assert (await client.get("/ready")).status_code == 503
    assert (await client.get("/health")).status_code == 200


async def test_metrics_count_outcomes_and_tokens(client: httpx.AsyncClient) -> None:
    await client.post(CHAT, json=chat())
    await client.post(CHAT, content=b"{", headers={"content-type": "application/json"})
    text = (await client.get("/metrics")).text
    for line in (
        'chiasm_requests_total{code="200"} 1.0',
        'chiasm_requests_total{code="400"} 1.0',
        "chiasm_prompt_tokens_total 11.0",
        "chiasm_generation_tokens_total 3.0",
        'chiasm_time_to_first_token_seconds_count{kind="text"} 1.0',
        "chiasm_e2e_request_latency_seconds_count 1.0",
        "chiasm_num_requests_running 0.0",
    ):
        assert line in text


async def test_tokenize_and_back(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/tokenize", json={"prompt": "a<|im_end|>"})).json()
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 8192
    back = await client.post("/detokenize", json={"tokens": answer["tokens"]})
    assert back.json() == {"prompt": "a<|im_end|>"}
    special = await client.post("/tokenize", json={"prompt": "a<|im_end|>", "parse_special": True})
    assert special.json()["count"] < answer["count"]
    turns = await client.post("/tokenize", json={"messages": chat()["messages"], "model": "demo"})
    text = (await client.post("/detokenize", json={"tokens": turns.json()["tokens"]})).json()
    assert text["prompt"].endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    check_error(await client.post("/tokenize", json={}), 400, "invalid_request", "prompt")
    answer = await client.post("/detokenize", json={"tokens": [5, 10**9]})
    check_error(answer, 400, "invalid_request", "tokens[1]")


async def test_completions_take_all_four_kinds_of_prompt(
    client: httpx.AsyncClient, pipeline: ScriptedPipeline
) -> None:
    for prompt, wanted in (
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([5, 6], [(5, 6)]),
        ([[5], [6]], [(5,), (6,)]),
    ):
        pipeline.jobs.clear()
        answer = await client.post(COMPLETIONS, json={"model": "demo", "prompt": prompt, "n": 2})
        jobs = [job for job in pipeline.jobs if isinstance(job, RawJob)]
        assert [job.prompt for job in jobs] == wanted
        assert len({job.request_id for job in jobs}) == len(jobs)
        assert jobs[0].sampling.max_tokens == 16
        choices = answer.json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(2 * len(wanted)))
        assert {choice["text"] for choice in choices} == {"red circle"}
        assert answer.json()["usage"]["prompt_tokens"] == 11 * len(wanted)


async def test_a_stream_over_several_prompts(client: httpx.AsyncClient) -> None:
    body = {"model": "demo", "prompt": ["a", "b"], "stream": True}
    chunks = events_of(await client.post(COMPLETIONS, json=body))
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == "red circle"
        assert mine[-1]["finish_reason"] == "stop"


async def test_one_failing_prompt_fails_the_request_and_ends_the_others(
    client: httpx.AsyncClient, pipeline: ScriptedPipeline
) -> None:
    pipeline.fail_after = (2, Unavailable("gone"))
    answer = await client.post(COMPLETIONS, json={"model": "demo", "prompt": ["a", "b", "c"]})
    check_error(answer, 503, "unavailable")
    assert len(pipeline.ends) == len(pipeline.jobs)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ({}, "prompt"),
        (None, "prompt"),
        ([1, "a"], "prompt[1]"),
        (["a", 1], "prompt[1]"),
        ([-1], "prompt[0]"),
        ([10**9], "prompt"),
        ([[1], [397]], "prompt[1]"),
    ],
)
async def test_bad_prompts(client: httpx.AsyncClient, prompt: object, param: str) -> None:
    answer = await client.post(COMPLETIONS, json={"model": "demo", "prompt": prompt})
    check_error(answer, 400, "invalid_request", param)


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
        MediaPart(Modality.IMAGE, url="data:,b", param="messages[1].content[1]"),
        MediaPart(Modality.VIDEO, url="data:,c", param="messages[1].content[2]"),
        TextPart(""),
    )
    assert job.messages[2].parts == ()
    assert job.messages[2].tool_calls[0].arguments == "{}"
    assert job.messages[3].tool_call_id == "c"


async def test_the_description_is_whole_and_the_page_needs_nothing_from_elsewhere(
    client: httpx.AsyncClient,
) -> None:
    document = (await client.get("/openapi.json")).json()
    names = set(document["components"]["schemas"])
    refs = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert refs <= names
    assert {CHAT, COMPLETIONS, "/v1/models", "/tokenize", "/ready"} <= set(document["paths"])
    chat_fields = document["components"]["schemas"]["ChatBody"]["properties"]
    assert {"messages", "top_k", "mm_processor_kwargs", "return_timings"} <= set(chat_fields)
    page = await client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "https://" not in page.text
    assert "http://" not in page.text


async def test_whole_answers_close_their_run(
    client: httpx.AsyncClient, pipeline: ScriptedPipeline
) -> None:
    pipeline.hold_first = asyncio.Event()
    request = asyncio.create_task(client.post(CHAT, json=chat()))
    while not pipeline.jobs:
        await asyncio.sleep(0.001)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    assert pipeline.ends == ["cancelled"]
