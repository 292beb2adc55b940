"""Requests with pictures through a gateway, each token's time noted; loads made of them."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

Make = Callable[[], list[dict[str, Any]]]
"""The parts of the next request's message."""


@dataclass(slots=True)
class Reply:
    """Seconds, from the sending of the request on."""

    times: list[float] = field(default_factory=list)
    total_s: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def first_s(self) -> float:
        """To the first token."""
        return self.times[0]

    @property
    def per_token_s(self) -> float:
        """Of a token behind the first."""
        return (self.times[-1] - self.times[0]) / max(1, self.tokens - 1)


class VisionClient:
    """Asks one gateway.

    Args:
        session: Without a limit of connections.
        url: Of the gateway.
        model: Its name there.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session = session
        self._url = f"{url}/v1/chat/completions"
        self._model = model

    async def ask(self, parts: Sequence[dict[str, Any]], max_tokens: int) -> Reply:
        """One request. Raises RuntimeError when it is refused or fails."""
        body = json.dumps(
            {
                "model": self._model,
                "messages": [{"role": "user", "content": list(parts)}],
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_timings": True,
            }
        ).encode()
        reply, began = Reply(), time.perf_counter()
        headers = {"content-type": "application/json"}
        async with self._session.post(self._url, data=body, headers=headers) as response:
            if response.status != 200:
                raise RuntimeError(f"{response.status} {await response.text()}")
            async for line in response.content:
                _read(line, reply, time.perf_counter() - began)
        reply.total_s = time.perf_counter() - began
        if not reply.times:
            raise RuntimeError("an empty answer")
        return reply

    async def one_by_one(self, make: Make, *, count: int, max_tokens: int) -> list[Reply]:
        """Each when the one before is over; the first is not counted."""
        return [await self.ask(make(), max_tokens) for _ in range(count + 1)][1:]

    async def at_a_rate(
        self, make: Make, *, rate: float, seconds: float, max_tokens: int
    ) -> list[Reply]:
        """Arrivals as of a Poisson process."""
        draw, tasks, at = random.Random(3), [], 0.0
        bodies = [make() for _ in range(round(rate * seconds))]
        began = time.perf_counter()
        for parts in bodies:
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            tasks.append(asyncio.create_task(self.ask(parts, max_tokens)))
            at += draw.expovariate(rate)
        return await asyncio.gather(*tasks)

    async def at_once(
        self, make: Make, *, count: int, max_tokens: int
    ) -> tuple[float, list[Reply]]:
        """Seconds until all of them are over, and what came."""
        bodies = [make() for _ in range(count)]
        began = time.perf_counter()
        replies = await asyncio.gather(*(self.ask(parts, max_tokens) for parts in bodies))
        return time.perf_counter() - began, replies

    async def in_flight(
        self, make: Make, *, clients: int, ramp_s: float, seconds: float, max_tokens: int
    ) -> list[Reply]:
        """So many requests under way at any time; those that end inside the window count."""
        begin = time.perf_counter() + ramp_s
        counted: list[Reply] = []

        async def client() -> None:
            while time.perf_counter() < begin + seconds:
                reply = await self.ask(make(), max_tokens)
                if begin <= time.perf_counter() < begin + seconds:
                    counted.append(reply)

        await asyncio.gather(*(client() for _ in range(clients)))
        return counted


def figures(replies: Sequence[Reply]) -> dict[str, float]:
    """Milliseconds; medians of the timeline's parts too."""
    firsts = np.array([reply.first_s for reply in replies]) * 1e3
    gaps = np.array([reply.per_token_s for reply in replies]) * 1e3
    found = {
        "requests": len(replies),
        "prompt_tokens": replies[0].prompt_tokens,
        "ttft_p50": float(np.percentile(firsts, 50)),
        "ttft_p99": float(np.percentile(firsts, 99)),
        "tpot_p50": float(np.percentile(gaps, 50)),
        "tpot_p99": float(np.percentile(gaps, 99)),
        "whole_p50": statistics.median(reply.total_s for reply in replies) * 1e3,
    }
    for name in replies[0].timings:
        found[name] = statistics.median(reply.timings.get(name, 0.0) for reply in replies)
    return {name: round(value, 2) for name, value in found.items()}


def _read(line: bytes, reply: Reply, now: float) -> None:
    data = line.removeprefix(b"data:").strip()
    if data in (line.strip(), b"[DONE]"):
        return
    event = json.loads(data)
    if "error" in event:
        raise RuntimeError(str(event["error"]))
    if usage := event.get("usage"):
        reply.prompt_tokens, reply.tokens = usage["prompt_tokens"], usage["completion_tokens"]
    reply.timings |= event.get("timings") or {}
    if any(choice.get("delta", {}).get("content") for choice in event.get("choices", ())):
        reply.times.append(now)
