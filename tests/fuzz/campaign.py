"""A running gateway, thousands of damaged inputs, and a good request after every few hundred."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from chiasm.process import Spec, Supervisor
from tests.fuzz import corpus
from tests.fuzz.mutate import Mutator
from tests.fuzz.services import ANSWER

EVERY = 500
AT_ONCE = 8
HANG_S = 30.0
WARM_SHARE = 0.25  # of the inputs, after which memory must be flat
GROWTH = 1.10
LEAST_FLOOR_BYTES = 16 << 20  # of growth that is no growth: an allocator's whims
SHARE_OF_MEDIA = 0.6


@dataclass(slots=True)
class Findings:
    """What came of it."""

    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    """Each with what is needed to send the input again."""
    goods: int = 0
    rss: dict[str, list[int]] = field(default_factory=dict)
    seconds: float = 0.0

    def check(self) -> None:
        """Raises AssertionError naming the first thing that is wrong."""
        assert not self.failures, "\n".join(self.failures[:5])
        for name, seen in self.rss.items():
            first, last = seen[int(len(seen) * WARM_SHARE)], seen[-1]
            limit = max(first * GROWTH, first + LEAST_FLOOR_BYTES)
            assert last <= limit, f"{name} grew from {first >> 20} to {last >> 20} MiB: {seen}"


@dataclass(frozen=True, slots=True)
class Target:
    """A gateway over services that really decode, each a process."""

    url: str
    pids: dict[str, int]


@contextlib.asynccontextmanager
async def target() -> AsyncIterator[Target]:
    """Starts and stops both processes."""
    lines: list[str] = []
    supervisor = Supervisor(lambda name, line: lines.append(f"{name}: {line}"), stop_s=5.0)
    try:
        services = (sys.executable, "-m", "tests.fuzz.services")
        behind = await supervisor.launch(Spec("services", services))
        flags = ["--model", "demo", "--port", "0", "--log-level", "error"]
        flags += ["--encoder-urls", behind["encoder"], "--decoder-urls", behind["decoder"]]
        gateway = (sys.executable, "-m", "gateway", *flags)
        ready = await supervisor.launch(Spec("gateway", gateway))
        yield Target(f"http://{ready['address']}", dict(supervisor.pids()))
        died = [line for line in lines if "died" in line or "Traceback" in line]
        assert not died, "\n".join(lines[-40:])
    finally:
        await supervisor.stop()


class Campaign:
    """Sends inputs, `AT_ONCE` together.

    Args:
        at: Where.
        seed: Equal seeds, equal inputs.
        inputs: How many.
        say: Told how far it has come.
    """

    def __init__(
        self, at: Target, *, seed: int, inputs: int, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self.found = Findings(rss={name: [] for name in at.pids})
        self._at = at
        self._mutator = Mutator(seed)
        self._inputs = inputs
        self._say = say
        self._pictures = corpus.files(clips=False)
        self._clips = corpus.files(clips=True)
        self._bodies = corpus.bodies()
        self._good = [
            {"model": "demo", "messages": [{"role": "user", "content": "Who?"}]},
            corpus.media_body(self._pictures[0], clip=False, stream=False) | {"max_tokens": 64},
        ]

    async def run(self) -> Findings:
        """All of it."""
        began = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=HANG_S)
        async with aiohttp.ClientSession(self._at.url, timeout=timeout) as session:
            await self._until_ready(session)
            for start in range(0, self._inputs, EVERY):
                numbers = iter(range(start, min(start + EVERY, self._inputs)))
                await asyncio.gather(*(self._worker(session, numbers) for _ in range(AT_ONCE)))
                await self._send_good(session, start)
                for name, pid in self._at.pids.items():
                    self.found.rss[name].append(_rss(pid))
                self._say(self._line(start))
        self.found.seconds = time.monotonic() - began
        return self.found

    async def _worker(self, session: aiohttp.ClientSession, numbers: Any) -> None:
        for number in numbers:
            route, body, headers = self._draw()
            await self._send(session, number, route, body, headers)

    def _draw(self) -> tuple[str, bytes, dict[str, str]]:
        """Route, body, headers of the next input."""
        mutator, headers = self._mutator, {"content-type": "application/json"}
        if mutator.chance(SHARE_OF_MEDIA):
            clip = mutator.chance(0.3)
            data = mutator.file(self._clips if clip else self._pictures)
            as_clip = clip if mutator.chance(0.97) else not clip
            body = corpus.media_body(data, clip=as_clip, stream=mutator.chance(0.3))
            return corpus.CHAT, orjson.dumps(body), headers
        route, whole = mutator.choice(self._bodies)
        if mutator.chance(0.7):
            text = json.dumps(mutator.json([whole])).encode()
        else:
            text = mutator.bytes_of_json(json.dumps(whole).encode())
        if mutator.chance(0.03):
            headers = {"content-type": mutator.choice(("text/plain", "", "application/x+json"))}
        return route, text, headers

    async def _send(
        self,
        session: aiohttp.ClientSession,
        number: int,
        route: str,
        body: bytes,
        headers: dict[str, str],
    ) -> None:
        what = f"input {number}: {route} {headers} {body[:3000]!r}"
        try:
            async with session.post(route, data=body, headers=headers) as answer:
                text = await answer.read()
        except TimeoutError:
            self.found.failures.append(f"hang; {what}")
            return
        except aiohttp.ClientError as error:
            self.found.failures.append(f"{error!r}; {what}")
            return
        self.found.statuses[answer.status] += 1
        broken = answer.status >= 500 or b"internal_error" in text or b"Traceback" in text
        if not broken and answer.status != 200:
            error = orjson.loads(text).get("error", {})
            broken = set(error) != {"message", "type", "param", "code"}
        if broken:
            self.found.failures.append(f"{answer.status} {text[:500]!r}; {what}")

    async def _send_good(self, session: aiohttp.ClientSession, start: int) -> None:
        for body in self._good:
            async with session.post(corpus.CHAT, json=body) as answer:
                text = await answer.read()
                content = answer.status == 200 and orjson.loads(text)["choices"][0]["message"]
            if not content or content["content"] != ANSWER:
                self.found.failures.append(f"good request after {start}: {text[:500]!r}")
            self.found.goods += 1

    def _line(self, start: int) -> str:
        memory = ", ".join(f"{name} {seen[-1] >> 20} MiB" for name, seen in self.found.rss.items())
        statuses = dict(sorted(self.found.statuses.items()))
        return f"{start + EVERY}: {statuses}, {len(self.found.failures)} failures, {memory}"

    async def _until_ready(self, session: aiohttp.ClientSession) -> None:
        async with asyncio.timeout(120):
            while True:
                async with session.get("/ready") as answer:
                    if (await answer.json())["images"]:
                        return
                await asyncio.sleep(0.1)


def _rss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    return 0
