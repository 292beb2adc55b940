"""What comes on a socket beside requests: heads without end, half heads, silence, noise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import httpx
import orjson
import pytest

from gateway import app
from gateway.api.protocol import MAX_OVERHEAD_BYTES
from gateway.app import Gateway
from gateway.messages import Delta, Event, Job
from gateway.outlet import Outlet
from tests.unit.gateway_face.scripted import ScriptedPipeline, chat, make_face
from tests.unit.gateway_face.test_app import config
from tests.waiting import until

POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(pipeline: ScriptedPipeline | None = None) -> AsyncIterator[Streams]:
    gateway = Gateway(make_face(pipeline or ScriptedPipeline()), config())
    await gateway.start()
    host, _, port = gateway.address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(60):
            yield reader, writer
    finally:
        writer.close()
        await gateway.stop()


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, object]]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].split()[0])
    return int(head.split()[1]), orjson.loads(await reader.readexactly(length))


async def pour(writer: asyncio.StreamWriter, what: bytes) -> int:
    """Writes until the other side has had enough; the bytes it took."""
    written = 0
    try:
        while written < 64 << 20:
            writer.write(what)
            await writer.drain()
            written += len(what)
    except OSError:
        pass
    return written


@pytest.mark.parametrize(
    "begin",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: ",
        b"GET /",
        POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: ",
        POST + b"Transfer-Encoding: chunked\r\n\r\n1;x=",
    ],
    ids=["header", "path", "trailer", "chunk extension"],
)
async def test_what_has_no_end_is_cut(begin: bytes) -> None:
    async with connected() as (_, writer):
        writer.write(begin)
        assert await pour(writer, b"a" * (1 << 16)) < 16 << 20  # sockets buffer some of it


async def test_a_long_head_is_refused_in_the_envelope() -> None:
    async with connected() as (reader, writer):
        writer.write(POST)
        for _ in range(2 * MAX_OVERHEAD_BYTES // 10_000):
            writer.write(b"X: " + b"a" * 10_000 + b"\r\n")
        status, body = await answer(reader)
        assert status == 400
        assert set(body["error"]) == {"message", "type", "param", "code"}  # type: ignore[call-overload]


async def test_long_bodies_are_no_overhead() -> None:
    body = orjson.dumps(chat() | {"user": "u" * (4 * MAX_OVERHEAD_BYTES)})
    async with connected() as (reader, writer):
        for _ in range(3):  # on one connection
            writer.write(POST + b"Transfer-Encoding: chunked\r\n\r\n")
            for at in range(0, len(body), 1000):
                piece = body[at : at + 1000]
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            writer.write(b"0\r\n\r\n")
            status, _ = await answer(reader)
            assert status == 200


async def test_what_is_not_http_gets_the_envelope() -> None:
    async with connected() as (reader, writer):
        writer.write(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        status, body = await answer(reader)
        assert status == 400 and "error" in body
        assert await reader.read() == b""


@pytest.mark.parametrize("begin", [b"", b"GET /health HTTP/1.1\r\nHost:"], ids=["none", "half"])
async def test_silent_connections_are_closed(begin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_SILENCE_S", 0.2)
    async with connected() as (reader, writer):
        writer.write(begin)
        assert await reader.read() == b""


@pytest.mark.parametrize("streamed", [True, False])
async def test_who_goes_with_requests_still_in_line_is_not_answered(streamed: bool) -> None:
    pipeline = ScriptedPipeline(hold=asyncio.Event())
    body = orjson.dumps(chat(stream=streamed))
    async with connected(pipeline) as (_, writer):
        writer.write(2 * (POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)))
        await until(lambda: pipeline.held == 1)
        writer.transport.abort()
        await until(lambda: pipeline.ends == ["cancelled"])
    assert len(pipeline.jobs) == 1


class ShortWay(ScriptedPipeline):
    """Lets all deltas but the first out at once."""

    async def run(self, job: Job, outlet: Outlet | None = None) -> AsyncGenerator[Event, None]:
        assert outlet is not None
        async for event in super().run(job):
            if isinstance(event, Delta) and outlet.ready():
                outlet.write(event)
            else:
                yield event
        self.ends.append(f"{outlet.tokens} at once")


async def test_what_is_written_past_the_server_is_part_of_the_answer() -> None:
    """On one connection, so that the next answer shows where the one before has ended."""
    words = ("red", " circle", " and", " more")
    pipeline = ShortWay(words=words)
    gateway = Gateway(make_face(pipeline), config())
    await gateway.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://{gateway.address}", timeout=60) as client:
            for _ in range(2):
                answer = await client.post("/v1/chat/completions", json=chat(stream=True))
                *frames, last = [line for line in answer.text.split("\n\n") if line]
                assert last == "data: [DONE]"
                chunks = [orjson.loads(frame.removeprefix("data: ")) for frame in frames]
                told = [c["choices"][0]["delta"].get("content") for c in chunks if c["choices"]]
                assert tuple(text for text in told if text) == words
    finally:
        await gateway.stop()
    assert pipeline.ends == 2 * ["finished", f"{len(words) - 1} at once"]
