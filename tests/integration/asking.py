"""Asking a gateway: pictures like no other, streams that end whole, refusals that are heeded."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
from PIL import Image

from tests.integration.cluster import PATIENCE_S, Cluster
from tests.integration.media import circle

COLOURS = ("red", "green", "blue", "yellow", "orange", "purple")


def open_client() -> httpx.AsyncClient:
    """A connection of its own for every request."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=180, limits=limits)


def unique(index: int, side: int = 112) -> Image.Image:
    """A picture like no other of its size."""
    image = circle(COLOURS[index % 6], (side, side))
    image.putpixel((index % side, index // side), (index % 251, index // 251, 7))
    return image


def body(*parts: object, salt: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": list(parts)}],
        "cache_salt": salt,
        "temperature": 0,
        "max_tokens": 8,
        "stream": True,
        **fields,
    }


async def pieces(
    client: httpx.AsyncClient, url: str, request: dict[str, Any]
) -> AsyncIterator[str]:
    """Text of a stream, piece by piece; fails unless it ends as a whole stream does."""
    async with client.stream("POST", f"{url}/v1/chat/completions", json=request) as response:
        if response.status_code != 200:
            raise AssertionError(f"{response.status_code}: {(await response.aread())[:300]!r}")
        done = False
        reasons = []
        async for line in response.aiter_lines():
            assert not done or not line, "something follows [DONE]"
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    if text := choice["delta"].get("content"):
                        yield text
                    reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        assert done and len(reasons) == 1, "the stream was interrupted"


async def answer(client: httpx.AsyncClient, url: str, request: dict[str, Any]) -> str:
    return "".join([piece async for piece in pieces(client, url, request)])


async def answers(cluster: Cluster, client: httpx.AsyncClient, requests: list[Any]) -> list[str]:
    return list(await asyncio.gather(*(answer(client, cluster.url, r) for r in requests)))


async def eventually(condition: Any, seconds: float = PATIENCE_S) -> None:
    """`Cluster.until` beside running requests."""
    await asyncio.to_thread(Cluster.until, condition, seconds)


async def empty(find: Callable[[], dict[str, Any]], seconds: float = PATIENCE_S) -> None:
    """Polls until nothing is found; fails with what is."""
    async with asyncio.timeout(seconds + 10):
        deadline = time.monotonic() + seconds
        while found := await asyncio.to_thread(find):
            assert time.monotonic() < deadline, found
            await asyncio.sleep(0.2)


async def patient(
    client: httpx.AsyncClient, url: str, request: dict[str, Any], *, within_s: float = 120
) -> httpx.Response:
    """Comes back when it is told to, for so long; the first answer that is no refusal."""
    async with asyncio.timeout(within_s):
        while True:
            reply = await client.post(f"{url}/v1/chat/completions", json=request)
            if reply.status_code not in (429, 503):
                return reply
            await asyncio.sleep(int(reply.headers["retry-after"]))


def text_of(reply: httpx.Response) -> str:
    """The answer of a request that was not streamed."""
    assert reply.status_code == 200, reply.text[:300]
    return str(reply.json()["choices"][0]["message"]["content"])
