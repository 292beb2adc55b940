"""Each role replaced while 50 streams are open and new ones arrive (E14): nobody notices.

A pod's end is played as Kubernetes does it: out of the list of who is called, the wait of preStop,
SIGTERM, and an exit of its own within the grace period.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from chiasm.demo import checkpoint_dir
from tests.integration.cluster import PATIENCE_S, free_port, scrape, total
from tests.integration.media import image_part, text_part
from tests.integration.stack import Service, Stack
from tests.integration.test_lost_ranks import Family, wait_for

pytestmark = pytest.mark.timeout(900)

STREAMS = 50
TOKENS = 48
PRE_STOP_S = 1.0
DRAIN_S, GRACE_S = 100.0, 120.0
PICTURES = {
    "red_circle.png": "The picture shows a red circle.",
    "purple_cross.png": "The picture shows a purple cross.",
}
DRAIN = ("--drain-s", str(DRAIN_S))
RANKS = ("--num-threads", "1", "--kv-blocks", "256", "--max-model-len", "512")


@dataclass
class Crowd:
    """Clients that always have one stream open each, at a gateway that is on the list."""

    gateways: list[Service] = field(default_factory=list)
    open: int = 0
    open_at: Counter[str] = field(default_factory=Counter)
    """Of these, by the gateway's address."""
    whole: int = 0
    broken: list[str] = field(default_factory=list)
    _numbers: Any = field(default_factory=itertools.count)

    @asynccontextmanager
    async def streaming(self) -> AsyncIterator[None]:
        """All streams are open when the block begins, and have ended when it is over."""
        ending = asyncio.Event()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=300, limits=limits) as http:
            tasks = [asyncio.create_task(self._client(http, ending)) for _ in range(STREAMS)]
            try:
                await self.until(lambda: self.open == STREAMS or bool(self.broken))
                yield
                assert self.whole >= STREAMS or self.broken, "too few for a claim"
            finally:
                ending.set()
                await asyncio.gather(*tasks)
        assert not self.broken, (len(self.broken), self.whole, self.broken[:3])

    async def more(self, count: int) -> None:
        """Waits for so many whole streams more."""
        goal = self.whole + count
        await self.until(lambda: self.whole >= goal or bool(self.broken))

    async def busy(self) -> None:
        """Waits for an instant at which more than half of the clients have a stream open.

        Clients fall into step with each other, so that at some instants most are between two
        streams. What is done next, without awaiting anything, is done while that many are open.
        """
        await self.until(lambda: self.open > STREAMS / 2 or bool(self.broken))

    @staticmethod
    async def until(condition: Any) -> None:
        async with asyncio.timeout(4 * PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.02)

    async def _client(self, http: httpx.AsyncClient, ending: asyncio.Event) -> None:
        while not ending.is_set():
            number = next(self._numbers)
            gateway = self.gateways[number % len(self.gateways)]
            try:
                problem = await self._stream(http, f"http://{gateway.address}", number)
            except httpx.HTTPError as error:
                problem = repr(error)
            if problem:
                self.broken.append(f"{number}: {problem}")
                return
            self.whole += 1

    async def _stream(self, http: httpx.AsyncClient, url: str, number: int) -> str:
        """What was wrong with it, if anything."""
        name = tuple(PICTURES)[number % len(PICTURES)]
        picture = image_part((checkpoint_dir().parent / "pictures" / name).read_bytes())
        request = {
            "model": "demo",
            "messages": [
                {"role": "user", "content": [picture, text_part("What is in the picture?")]}
            ],
            "cache_salt": str(number // 4),  # most pictures are encoded, some rows are at hand
            "temperature": 0,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        text, usage, done = "", 0, False
        async with http.stream("POST", f"{url}/v1/chat/completions", json=request) as reply:
            if reply.status_code != 200:
                return f"{reply.status_code} {(await reply.aread())[:200]!r}"
            self.open += 1
            self.open_at[url] += 1
            try:
                async for line in reply.aiter_lines():
                    done = done or line == "data: [DONE]"
                    if line.startswith("data: {"):
                        event = json.loads(line.removeprefix("data: "))
                        if "error" in event:
                            return str(event)
                        usage = (event.get("usage") or {}).get("completion_tokens", usage)
                        text += "".join(c["delta"].get("content") or "" for c in event["choices"])
            finally:
                self.open -= 1
                self.open_at[url] -= 1
        right = done and usage == TOKENS and text.startswith(PICTURES[name])
        return "" if right else f"done={done} usage={usage} {text!r}"


class Pods:
    """Two of each role, replaced one by one."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.ports = {role: [free_port(), free_port()] for role in ("encoder_svc", "decoder_svc")}
        self.flags: dict[int, tuple[str, ...]] = {}
        self.services: dict[int, Service] = {}

    async def start(self) -> list[Service]:
        """Everything; returns the gateways."""
        for role, ports in self.ports.items():
            for port in ports:
                self._start(role, port)
        for service in self.services.values():
            await asyncio.to_thread(service.wait_ready)
        return [await self.gateway() for _ in range(2)]

    async def gateway(self) -> Service:
        """Another gateway, which uses all pods."""
        peers: list[str] = []
        for role, flag in (("encoder_svc", "--encoder-urls"), ("decoder_svc", "--decoder-urls")):
            peers += [f"{flag}=127.0.0.1:{port}" for port in self.ports[role]]
        service = self.stack.start("gateway", *peers, *DRAIN)
        await asyncio.to_thread(service.wait_ready)
        await self.seen_by([service])
        return service

    async def seen_by(self, gateways: list[Service]) -> None:
        """Waits until they use all pods."""
        async with httpx.AsyncClient(timeout=60) as http, asyncio.timeout(PATIENCE_S):
            for gateway in gateways:
                while True:
                    reply = await http.get(f"http://{gateway.address}/ready")
                    if sum(e["ready"] for e in reply.json()["endpoints"]) == 4:
                        break
                    await asyncio.sleep(0.05)

    async def replace(self, role: str, port: int, crowd: Crowd) -> None:
        """The pod at this port ends, then another begins there."""
        await end(self.services[port], crowd)
        self._start(role, port)
        await asyncio.to_thread(self.services[port].wait_ready)

    def _start(self, role: str, port: int) -> None:
        flags = self.flags.get(port, ())
        self.services[port] = self.stack.start(role, "--port", str(port), *DRAIN, *flags)


async def end(service: Service, crowd: Crowd) -> None:
    """PreStop, SIGTERM while most clients have a stream open, an orderly exit."""
    await asyncio.sleep(PRE_STOP_S)
    await crowd.busy()
    open_streams, own = crowd.open, crowd.open_at[f"http://{service.address}"]
    service.kill(signal.SIGTERM)
    began = time.monotonic()
    assert await asyncio.to_thread(service.process.wait, GRACE_S) == 0, service.lines[-5:]
    assert open_streams > STREAMS / 2 or crowd.broken
    gone_s = time.monotonic() - began
    through = f", {own} of them through it" if service.name == "gateway" else ""
    print(f"{service.name}: SIGTERM with {open_streams} streams open{through}, gone", end=" ")
    print(f"{gone_s:.1f} s later")


@pytest.fixture
async def pods() -> AsyncIterator[Pods]:
    found = Pods(Stack("demo"))
    try:
        yield found
    finally:
        await asyncio.to_thread(found.stack.stop)


async def test_every_role_is_replaced_under_fifty_streams(pods: Pods) -> None:
    crowd = Crowd(await pods.start())
    async with crowd.streaming():
        for role in ("encoder_svc", "decoder_svc"):
            for port in pods.ports[role]:
                await crowd.more(10)
                await pods.replace(role, port, crowd)
                await pods.seen_by(crowd.gateways)
        for old in tuple(crowd.gateways):
            await crowd.more(10)
            crowd.gateways.append(await pods.gateway())
            await crowd.busy()
            crowd.gateways.remove(old)
            await end(old, crowd)
        await crowd.more(STREAMS)
    print(f"{crowd.whole} whole streams")


async def test_streams_of_a_decoder_that_lost_a_rank_move_to_the_other(pods: Pods) -> None:
    wide, metrics_port = pods.ports["decoder_svc"][0], free_port()
    pods.flags[wide] = ("--pp-size", "2", "--metrics-port", str(metrics_port), *RANKS)
    crowd = Crowd(await pods.start())
    async with crowd.streaming():
        await crowd.more(10)
        family = Family(pods.services[wide].process.pid)
        assert len(family.ranks) == 2
        on_it = await stop_at_work(family.ranks[0], metrics_port)
        os.kill(family.ranks[0], signal.SIGKILL)
        await crowd.more(STREAMS)

        def is_back() -> bool:
            ranks = Family(pods.services[wide].process.pid).ranks
            return len(ranks) == 2 and not set(ranks) & set(family.ranks)

        await asyncio.to_thread(wait_for, is_back)
        await pods.seen_by(crowd.gateways)
        await crowd.more(10)
    moved = [total(scrape(f"http://{g.address}/metrics"), MIGRATIONS) for g in crowd.gateways]
    print(f"{crowd.whole} whole streams, {on_it:.0f} on the lost rank, {sum(moved):.0f} moved")
    assert sum(moved) > 0


async def stop_at_work(rank: int, metrics_port: int) -> float:
    """Stops a rank while its decoder has streams, which now cannot end; returns how many."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            os.kill(rank, signal.SIGSTOP)
            await asyncio.sleep(0.2)  # what it did last has been counted
            page = await asyncio.to_thread(scrape, f"http://127.0.0.1:{metrics_port}/metrics")
            if (running := total(page, "chiasm_num_requests_running")) > 1:
                return running
            os.kill(rank, signal.SIGCONT)
            await asyncio.sleep(0.2)


MIGRATIONS = "chiasm_request_migrations_total"
