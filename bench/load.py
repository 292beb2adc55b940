"""A closed loop of clients that stream chat completions; counts what ends inside a window."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp

from bench.pool import Pool


@dataclass(frozen=True, slots=True)
class Target:
    """A server with OpenAI's chat completions, and the name it gives the model."""

    name: str
    url: str
    model: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: the question asked, seconds to the first text and in all, the text, its end."""

    item: int
    first_s: float
    total_s: float
    text: str
    ended: float


@dataclass(frozen=True, slots=True)
class Window:
    """When requests count: `ramp_s` after the start, for `length_s`; then no new ones are sent."""

    ramp_s: float
    length_s: float


@dataclass(frozen=True, slots=True)
class Round:
    """The requests that ended inside one window; how many there were in all."""

    samples: tuple[Sample, ...]
    length_s: float
    num_sent: int

    @property
    def rate(self) -> float:
        """Requests per second."""
        return len(self.samples) / self.length_s


async def run_round(
    target: Target, pool: Pool, *, first: int, clients: int, window: Window, max_tokens: int
) -> Round:
    """Keeps `clients` requests under way until the window closes, then lets the last ones end.

    Args:
        target: Who is asked.
        pool: What is asked, in turn.
        first: Index of the first question.
        clients: Requests under way.
        window: What counts.
        max_tokens: Of an answer.

    Raises:
        RuntimeError: A request failed: a server that refuses work has no rate.
    """
    begin = time.perf_counter() + window.ramp_s
    end = begin + window.length_s
    turns = (index % len(pool.items) for index in itertools.count(first))
    settings = {"model": target.model, "temperature": 0, "max_tokens": max_tokens, "stream": True}
    samples: list[Sample] = []

    async def client(session: aiohttp.ClientSession) -> None:
        while time.perf_counter() < end:
            item = next(turns)
            body = json.dumps(settings | {"messages": pool.messages(item)}).encode()
            samples.append(await _ask(session, target, item, body))

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=300)
    headers = {"content-type": "application/json"}
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(clients):
            group.create_task(client(session))
    counted = tuple(sample for sample in samples if begin <= sample.ended < end)
    return Round(counted, window.length_s, len(samples))


async def _ask(session: aiohttp.ClientSession, target: Target, item: int, body: bytes) -> Sample:
    start = time.perf_counter()
    first, pieces = 0.0, []
    async with session.post(f"{target.url}/v1/chat/completions", data=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{target.name}: {response.status} {await response.text()}")
        async for line in response.content:
            for piece in _pieces(target, line):
                first = first or time.perf_counter()
                pieces.append(piece)
    if not first:
        raise RuntimeError(f"{target.name}: an empty answer")
    ended = time.perf_counter()
    return Sample(item, first - start, ended - start, "".join(pieces), ended)


def _pieces(target: Target, line: bytes) -> Iterator[str]:
    data = line.removeprefix(b"data:").strip()
    if data == line.strip() or data == b"[DONE]":
        return
    event = json.loads(data)
    if "error" in event:
        raise RuntimeError(f"{target.name}: {event['error']}")
    for choice in event.get("choices", ()):
        if piece := choice.get("delta", {}).get("content"):
            yield piece
