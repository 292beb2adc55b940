"""Every error in one shape, with its status."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

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
from gateway.api.budget import ByteBudget
from gateway.messages import (
    MediaPart,
)
from tests.unit.gateway_face.scripted import (
    CHAT,
    COMPLETIONS,
    ScriptedPipeline,
    chat,
    check_error,
    client_of,
    events_of,
    make_face,
)


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


async def test_bodies_of_all_requests_together_are_bounded() -> None:
    pipeline = ScriptedPipeline(hold_first=asyncio.Event())
    face = replace(make_face(pipeline), bodies=ByteBudget(10_000))
    body = chat("x" * 6_000)
    async with client_of(face) as client:
        first = asyncio.create_task(client.post(CHAT, json=body))
        while not pipeline.held:
            await asyncio.sleep(0.001)
        check_error(await client.post(CHAT, json=body), 429, "resource_exhausted")
        assert pipeline.hold_first is not None
        pipeline.hold_first.set()
        assert (await first).status_code == 200
        assert (await client.post(CHAT, json=body)).status_code == 200
    assert face.bodies.held == 0


async def test_a_client_that_stops_in_the_middle_of_its_body_is_let_go(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.api.body.SILENCE_S", 0.02)

    async def stalls() -> AsyncIterator[bytes]:
        yield b'{"model": '
        await asyncio.sleep(5)

    headers = {"content-type": "application/json"}
    answer = await client.post(CHAT, content=stalls(), headers=headers)
    check_error(answer, 504, "deadline_exceeded")


async def test_large_bodies_are_parsed_and_too_large_ones_are_413(
    pipeline: ScriptedPipeline,
) -> None:
    url = "data:image/png;base64," + "A" * 100_000
    part = {"type": "image_url", "image_url": {"url": url}}
    async with client_of(make_face(pipeline, max_body=200_000)) as client:
        assert (await client.post(CHAT, json=chat([part]))).status_code == 200
        (got,) = pipeline.jobs[-1].messages[0].parts  # type: ignore[union-attr]
        assert got == MediaPart(Modality.IMAGE, data=bytes(75_000), param="messages[0].content[0]")
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
