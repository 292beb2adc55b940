"""The commands' own client: message parts, streams, and whose words an error carries."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from chiasm.cli.bench import Load, Sample, percentile, report, run_bench
from chiasm.cli.client import Client, media_part, user_message
from chiasm.cli.failure import CommandFailed

Handler = Callable[[httpx.Request], httpx.Response]


def client(handler: Handler, api_key: str = "") -> Client:
    return Client("http://gateway/", api_key=api_key, transport=httpx.MockTransport(handler))


def sse(*events: object) -> httpx.Response:
    lines = [f"data: {e if isinstance(e, str) else json.dumps(e)}\n\n" for e in events]
    return httpx.Response(200, text=": a comment\n\n" + "".join(lines))


def piece(text: str | None) -> dict[str, object]:
    return {"choices": [{"delta": {"content": text}}]}


@pytest.mark.parametrize(
    ("name", "kind", "media_type"),
    [
        ("a.png", "image_url", "image/png"),
        ("a.JPG", "image_url", "image/jpeg"),
        ("clip.mp4", "video_url", "video/mp4"),
        ("noise", "image_url", "application/octet-stream"),
    ],
)
def test_files_travel_inside_the_request(
    tmp_path: Path, name: str, kind: str, media_type: str
) -> None:
    (tmp_path / name).write_bytes(b"\x00\xffbytes")
    part = media_part(tmp_path / name)
    assert part["type"] == kind
    head, _, body = part[kind]["url"].partition(",")
    assert head == f"data:{media_type};base64"
    assert base64.b64decode(body) == b"\x00\xffbytes"


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("https://h/a.png?x=1.mp4", "image_url"),
        ("https://h/a.mp4?x=1", "video_url"),
        ("data:video/mp4;base64,AA==", "video_url"),
    ],
)
def test_urls_stay_as_they_are(url: str, kind: str) -> None:
    assert media_part(url) == {"type": kind, kind: {"url": url}}


def test_media_come_before_the_question() -> None:
    message = user_message(["https://h/a.png", "https://h/b.png"], "Which?")
    kinds = [part["type"] for part in message["content"]]
    assert kinds == ["image_url", "image_url", "text"]


async def test_a_whole_answer() -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer secret"
        assert json.loads(request.content) == {"model": "m"}
        body = {
            "choices": [{"message": {"content": "It is red."}}],
            "usage": {"prompt_tokens": 7, "completion_tokens": 3},
            "timings": {"encode": 1.5},
        }
        return httpx.Response(200, json=body)

    async with client(handle, "secret") as talk:
        answer = await talk.answer({"model": "m"})
    assert (answer.text, answer.prompt_tokens, answer.completion_tokens) == ("It is red.", 7, 3)
    assert answer.timings == {"encode": 1.5}


async def test_a_stream_yields_its_pieces() -> None:
    events = (piece(""), piece("It is"), piece(" red."), piece(None), {"choices": []}, "[DONE]")
    async with client(lambda _: sse(*events)) as talk:
        assert [text async for text in talk.stream({})] == ["It is", " red."]


async def test_an_error_inside_a_stream_is_raised_after_what_came_before() -> None:
    events = (piece("It is"), {"error": {"message": "rows were lost"}})
    seen = []
    async with client(lambda _: sse(*events)) as talk:
        with pytest.raises(CommandFailed, match="rows were lost"):
            async for text in talk.stream({}):
                seen.append(text)
    assert seen == ["It is"]


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (
            httpx.Response(400, json={"error": {"message": "no such picture"}}),
            "400: no such picture",
        ),
        (httpx.Response(502, text="<html>"), "502: Bad Gateway"),
        (httpx.Response(500, json=[]), "500: Internal Server Error"),
    ],
)
async def test_errors_use_the_gateways_words(response: httpx.Response, words: str) -> None:
    async with client(lambda _: response) as talk:
        with pytest.raises(CommandFailed, match=words):
            await talk.answer({})


async def test_nobody_there_says_what_to_do() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    async with client(refuse) as talk:
        with pytest.raises(CommandFailed, match="start it with `chiasm up`"):
            await talk.model()


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([], 50, 0.0),
        ([3.0], 99, 3.0),
        ([4, 1, 3, 2], 50, 2),
        ([4, 1, 3, 2], 75, 3),
        (range(1, 101), 99, 99),
    ],
)
def test_percentiles_are_nearest_rank(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == expected


def test_the_report_is_in_milliseconds() -> None:
    table = report([Sample(first_s=0.1, gaps_s=[0.02, 0.04], total_s=0.16)])
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["time to first token", "inter-token latency", "whole request"]
    assert cells[1] == ["100.0", "20.0", "160.0"]


async def test_bench_counts_failures_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    calls = 0

    def handle(request: httpx.Request) -> httpx.Response:
        nonlocal calls
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        calls += 1
        if calls % 4 == 0:
            return httpx.Response(429, json={"error": {"message": "full"}})
        return sse(piece("a"), piece("b"), "[DONE]")

    async with client(handle) as talk:
        assert await run_bench(talk, Load(requests=8, concurrency=3)) == 1
    out = capsys.readouterr().out
    assert "6 requests in" in out
    assert "2 failed: 429: full" in out
