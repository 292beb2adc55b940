"""Bodies read straight to their place: what is read, what comes after, and what goes wrong."""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import orjson
import pytest
import uvloop

from chiasm.errors import DeadlineExceeded
from gateway.api import body as reading
from gateway.api.budget import ByteBudget
from gateway.api.filling import Filling
from gateway.app import Gateway
from tests.unit.gateway_face.scripted import ScriptedPipeline, chat, make_face
from tests.unit.gateway_face.test_app import config
from tests.unit.gateway_face.test_protocol import POST, Streams, answer
from tests.waiting import until

PICTURE = random.Random(2).randbytes(450_000)
URL = "data:image/png;base64," + base64.b64encode(PICTURE).decode()
BODY = orjson.dumps(chat([{"type": "image_url", "image_url": {"url": URL}}]))
HEAD = POST + b"Content-Length: %d\r\n\r\n" % len(BODY)
SMALL = orjson.dumps(chat())
NEXT = POST + b"Content-Length: %d\r\n\r\n%s" % (len(SMALL), SMALL)
BEGUN = 40_000
"""Enough of a body to set memory aside for the rest."""


class Filled(list[int]):
    """Sizes of pieces."""

    num_placed = 0
    """Bodies that memory was set aside for."""


Test = Callable[[Filled, pytest.MonkeyPatch], Coroutine[None, None, None]]


def on_both_loops(test: Test) -> Callable[..., None]:
    """Loops differ in how they change from one protocol to another."""

    @pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
    def run(
        loop: Callable[[], asyncio.AbstractEventLoop],
        filled: Filled,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(test(filled, monkeypatch))

    return run


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> Filled:
    """How many bytes came by themselves, each time that something did."""
    pieces = Filled()
    whole, begin = Filling.buffer_updated, Filling.__init__

    def noted(self: Filling, nbytes: int) -> None:
        pieces.append(nbytes)
        whole(self, nbytes)

    def placed(self: Filling, *args: Any, **kwargs: Any) -> None:
        pieces.num_placed += 1
        begin(self, *args, **kwargs)

    monkeypatch.setattr(Filling, "buffer_updated", noted)
    monkeypatch.setattr(Filling, "__init__", placed)
    return pieces


@asynccontextmanager
async def connected(pipeline: ScriptedPipeline, budget: int = 1 << 30) -> AsyncIterator[Streams]:
    face = replace(make_face(pipeline), bodies=ByteBudget(budget))
    gateway = Gateway(face, config())
    await gateway.start()
    host, _, port = gateway.address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(60):
            yield reader, writer
        await until(lambda: face.bodies.held == 0)
    finally:
        writer.close()
        await gateway.stop()


async def begin(writer: asyncio.StreamWriter, filled: Filled) -> int:
    """Sends half of a body in two pieces, each read by itself; returns where it stopped."""
    num_placed = filled.num_placed
    writer.write(HEAD + BODY[:BEGUN])
    await until(lambda: filled.num_placed > num_placed)
    writer.write(BODY[BEGUN : 2 * BEGUN])
    await until(lambda: filled)
    return 2 * BEGUN


def media(pipeline: ScriptedPipeline) -> list[bytes]:
    return [job.messages[0].parts[0].data for job in pipeline.jobs]  # type: ignore[union-attr]


@on_both_loops
async def test_a_body_arrives_whole_and_the_next_request_is_understood(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = ScriptedPipeline()
    async with connected(pipeline) as (reader, writer):
        for _ in range(3):
            at = await begin(writer, filled)
            for start in range(at, len(BODY), 100_000):
                writer.write(BODY[start : start + 100_000])
                await writer.drain()
                await asyncio.sleep(0.001)
            assert (await answer(reader))[0] == 200
            assert sum(filled) > len(BODY) // 2
            filled.clear()
        assert media(pipeline) == [PICTURE] * 3


@on_both_loops
async def test_requests_behind_it_wait_for_their_turn(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = ScriptedPipeline()
    async with connected(pipeline) as (reader, writer):
        at = await begin(writer, filled)
        writer.write(BODY[at:] + NEXT + HEAD + BODY + NEXT)
        assert [(await answer(reader))[0] for _ in range(4)] == [200] * 4
        assert [len(job.messages[0].parts) for job in pipeline.jobs] == [1] * 4  # type: ignore[union-attr]


@on_both_loops
async def test_a_body_over_the_budget_is_refused_and_the_connection_goes_on(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = ScriptedPipeline()
    async with connected(pipeline, budget=len(BODY) - 1) as (reader, writer):
        writer.write(HEAD + BODY[:BEGUN])
        await writer.drain()
        status, _ = await answer(reader)
        assert status == 429
        writer.write(BODY[BEGUN:] + NEXT)
        assert (await answer(reader))[0] == 200


@on_both_loops
async def test_silence_in_the_middle_ends_the_request_and_not_the_connection(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "SILENCE_S", 0.3)
    async with connected(ScriptedPipeline()) as (reader, writer):
        at = await begin(writer, filled)
        status, body = await answer(reader)
        assert status == DeadlineExceeded.http_status
        assert body["error"]["code"] == DeadlineExceeded.code  # type: ignore[index]
        monkeypatch.undo()
        writer.write(BODY[at:] + NEXT)
        assert (await answer(reader))[0] == 200


@on_both_loops
async def test_a_client_that_goes_in_the_middle_leaves_nothing(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = ScriptedPipeline()
    async with connected(pipeline) as (_, writer):
        await begin(writer, filled)
        writer.transport.abort()
        await asyncio.sleep(0.1)
    assert pipeline.jobs == []


@on_both_loops
async def test_a_promise_alone_takes_no_memory(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connected(ScriptedPipeline()) as (_, writer):
        writer.write(POST + b"Content-Length: 8000000\r\n\r\n" + BODY[:1000])
        await asyncio.sleep(0.1)
        writer.write(BODY[:10_000])
        await asyncio.sleep(0.1)
        writer.transport.abort()
        await asyncio.sleep(0.05)
    assert not filled
