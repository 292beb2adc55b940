"""Long runs of what wears services down: caches that are too small, restarts, floods of pictures.

Each is short by default and whole with SOAK=whole (`make soak`, about an hour), which prints
its figures.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from tests.integration import delays
from tests.integration.aborts import Deserter
from tests.integration.asking import (
    COLOURS,
    answer,
    body,
    empty,
    eventually,
    open_client,
    patient,
    text_of,
    unique,
)
from tests.integration.cluster import Cluster, Node
from tests.integration.media import circle, image_part, text_part
from tests.integration.residue import held

WHOLE = os.environ.get("SOAK") == "whole"
ROW_BYTES = 128 * 4  # of the demo model
SIDE, PATCHES = 224, 256  # pixels; 64 rows
TWO_PICTURES = 2 * 64 * ROW_BYTES
QUESTION = text_part("What is in the picture?")
PENDING_PATCHES = 4000  # an encoder refuses more

pytestmark = pytest.mark.timeout(2400 if WHOLE else 600)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One encoder, whose cache holds two pictures, and one decoder."""
    flags = ("--cache-bytes", str(TWO_PICTURES))
    running = Cluster(tmp_path_factory.mktemp("small"), num_each=1, encoder_flags=flags)
    try:
        yield running
    finally:
        running.close()


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with open_client() as http:
        yield http


async def assert_well(cluster: Cluster, client: httpx.AsyncClient, salt: str) -> None:
    """Nothing is held, no step has failed, and a picture is answered."""
    await empty(lambda: held(cluster))
    assert all(node.metrics()["chiasm_step_failures_total"] == 0 for node in cluster.decoders)
    assert all(node.alive for node in (*cluster.encoders, *cluster.decoders))
    picture = image_part(circle("red", (SIDE, SIDE)))
    assert "red" in await answer(client, cluster.url, body(picture, QUESTION, salt=salt))


async def test_three_pictures_take_turns_in_a_cache_of_two(
    small: Cluster, client: httpx.AsyncClient
) -> None:
    """D10: four clients, every third request of each aborted at some stage."""
    num_clients, num_requests = 4, 10_000 if WHOLE else 240
    small.heal()
    pictures = [image_part(circle(colour, (SIDE, SIDE))) for colour in COLOURS[:3]]
    deserter = Deserter(small.gateway.address, seed=10)
    encoded, began = small.encoders[0].num_encoded(), time.monotonic()
    outcomes: Counter[str] = Counter()

    async def ask(number: int, stage: str) -> None:
        which = number % len(pictures)
        lead = text_part(f"Number {number}. ")  # no prefix is shared: the rows are needed each time
        request = body(lead, pictures[which], QUESTION, salt="turns")
        if number % 3 == 2:
            await deserter.abort(request | {"max_tokens": 64, "ignore_eos": True}, stage)
            outcomes["aborted"] += 1
        else:
            text = await answer(client, small.url, request)
            outcomes["right" if COLOURS[which] in text else "wrong"] += 1

    async def take_turns(first: int) -> None:
        stages = deserter.stages(num_requests // num_clients)
        for turn, stage in enumerate(stages):
            await ask(first + num_clients * turn, stage)

    await asyncio.gather(*(take_turns(first) for first in range(num_clients)))
    encoded = small.encoders[0].num_encoded() - encoded
    print(f"D10: {dict(outcomes)}, cut off: {deserter.cut}, {encoded} encodes,")
    print(f"{time.monotonic() - began:.0f} s")
    assert outcomes["wrong"] == 0 and outcomes["right"] >= 0.6 * num_requests
    assert encoded > num_requests / 20  # the cache was too small indeed
    await assert_well(small, client, "turns")


async def test_requests_larger_than_the_cache_are_answered(
    small: Cluster, client: httpx.AsyncClient
) -> None:
    """D11: each shows more pictures than the cache holds, many at once; sent twice."""
    num_requests, num_pictures = (20, 20) if WHOLE else (4, 5)
    small.heal()
    began = time.monotonic()

    def request(index: int) -> dict[str, object]:
        pictures = [image_part(unique(index * num_pictures + i, SIDE)) for i in range(num_pictures)]
        return body(*pictures, QUESTION, salt="large", stream=False)

    requests = [request(index) for index in range(num_requests)]

    async def ask(request: dict[str, object]) -> str:
        within_s = 900 if WHOLE else 300
        return text_of(await patient(client, small.url, request, within_s=within_s))

    async def answers() -> list[str]:
        return list(await asyncio.gather(*map(ask, requests)))

    first = await answers()
    assert all(first) and await answers() == first
    print(f"D11: 2 x {num_requests} of {num_pictures}: {time.monotonic() - began:.0f} s")
    await assert_well(small, client, "large")


async def test_a_refused_or_aborted_request_changes_nothing(
    small: Cluster, client: httpx.AsyncClient
) -> None:
    """D11: its pictures are fine in the next request."""
    rounds = 20 if WHOLE else 2
    small.heal()
    deserter = Deserter(small.gateway.address, seed=11)
    for index in range(rounds):
        pictures = [image_part(unique(2 * index + i, SIDE)) for i in range(2)]
        request = body(*pictures, QUESTION, salt="refused", stream=False)
        too_long = body(*pictures, text_part("word " * 9000), salt="refused", stream=False)
        reply = await client.post(f"{small.url}/v1/chat/completions", json=too_long)
        assert reply.status_code == 400, reply.text
        small.slow_down(all=0.2)
        await deserter.abort(request | {"stream": True}, "encode")
        small.slow_down()
        told = text_of(await patient(client, small.url, request))
        assert told == text_of(await patient(client, small.url, request))
    await assert_well(small, client, "refused")


@pytest.mark.parametrize("role", ["encoder", "decoder"])
async def test_one_side_restarts_in_mid_traffic(
    small: Cluster, client: httpx.AsyncClient, role: str
) -> None:
    """D11: its cache is gone, the other side's is not; whoever is refused comes back."""
    rounds, num_requests = (5, 40) if WHOLE else (1, 12)
    small.heal()
    (node,) = small.encoders if role == "encoder" else small.decoders
    pictures = [image_part(circle(colour, (SIDE, SIDE))) for colour in COLOURS[:3]]

    async def ask(number: int, salt: str) -> str:
        parts = (text_part(f"Number {number}. "), pictures[number % 3], QUESTION)
        request = body(*parts, salt=salt, stream=False)
        reply = await patient(client, small.url, request, within_s=300)
        return text_of(reply)

    for turn in range(rounds):
        salt = f"restart {role} {turn}"
        done = node.num_encoded() if role == "encoder" else 0
        small.slow_down(all=0.2, token=0.005)  # nothing is over before it has been seen
        running = [asyncio.create_task(ask(i, salt)) for i in range(num_requests)]
        await eventually(lambda: _is_at_work(node, done))  # noqa: B023, awaited at once
        small.slow_down(all=delays.HOLD, token=delays.HOLD)
        assert not all(task.done() for task in running)
        node.kill()
        small.slow_down()
        small.revive(node).wait_ready()
        texts = await asyncio.gather(*running)
        assert all(COLOURS[i % 3] in text for i, text in enumerate(texts)), texts
    await assert_well(small, client, f"restarted {role}")


def _is_at_work(node: Node, done: int) -> bool:
    if node.role == "encoder":
        return node.num_encoded() > done
    return node.metrics()["chiasm_num_requests_running"] > 0


@pytest.fixture(scope="module")
def flooded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Encoders that take long for a picture, and refuse what would wait too long."""
    flags = ("--max-pending-patches", str(PENDING_PATCHES))
    running = Cluster(tmp_path_factory.mktemp("flooded"), encoder_flags=flags)
    try:
        yield running
    finally:
        running.close()


class Flood:
    """Clients that ask about pictures, and others that ask in text."""

    def __init__(self, cluster: Cluster, client: httpx.AsyncClient, num_clients: int) -> None:
        self.outcomes: Counter[int] = Counter()
        """Of requests with a picture, by status."""
        self.most_pending = 0.0
        """Patches that waited at an encoder."""
        self._cluster = cluster
        self._client = client
        self._num_clients = num_clients
        self._draw = random.Random(7)

    async def pictures(self, seconds: float) -> None:
        """Returns once what was asked within so long has been answered or refused."""
        until = time.monotonic() + seconds
        watching = asyncio.create_task(self._watch())
        await asyncio.gather(*(self._ask_about_pictures(until) for _ in range(self._num_clients)))
        watching.cancel()

    async def text_s(self, seconds: float) -> float:
        """Median of answers to text over so long."""
        took: list[float] = []
        until = time.monotonic() + seconds
        await asyncio.gather(*(self._ask_in_text(until, took) for _ in range(self._num_clients)))
        return statistics.median(took)

    async def _ask_about_pictures(self, until: float) -> None:
        """Once at least."""
        url = f"{self._cluster.url}/v1/chat/completions"
        while True:
            picture = image_part(unique(self._draw.randrange(2 * self._num_clients), SIDE))
            request = body(picture, QUESTION, salt="flood", stream=False)
            reply = await self._client.post(url, json=request, timeout=600)
            self.outcomes[reply.status_code] += 1
            if reply.status_code != 200:
                await asyncio.sleep(int(reply.headers["retry-after"]))
            if time.monotonic() >= until:
                return

    async def _ask_in_text(self, until: float, took: list[float]) -> None:
        while time.monotonic() < until:
            await asyncio.sleep(self._draw.uniform(0, self._num_clients / 4))  # 8 a second, of all
            began = time.monotonic()
            question = text_part(f"Who are you? {self._draw.random()}")
            await answer(self._client, self._cluster.url, body(question, salt="flood"))
            took.append(time.monotonic() - began)

    async def _watch(self) -> None:
        while True:
            for node in self._cluster.encoders:
                metrics = await asyncio.to_thread(node.metrics)
                pending = metrics["chiasm_encoder_pending_patches"]
                self.most_pending = max(self.most_pending, pending)
            await asyncio.sleep(0.5)


async def test_text_does_not_wait_for_slow_pictures(
    flooded: Cluster, client: httpx.AsyncClient
) -> None:
    """E07: as many clients ask about pictures, some of them again and again, as ask in text."""
    if not WHOLE:
        await _answers_beside_held_pictures(flooded, client)
        return
    num_clients, load_s = 64, 300.0
    flooded.slow_down(all=5.0)
    flood = Flood(flooded, client, num_clients)
    before_s = await flood.text_s(load_s / 4)
    pictures = asyncio.create_task(flood.pictures(load_s))
    beside_s = await flood.text_s(load_s)
    await pictures
    after_s = await flood.text_s(load_s / 4)
    print(f"E07: pictures {dict(flood.outcomes)}, at most {flood.most_pending:.0f} patches waited;")
    print(f"text took {before_s * 1e3:.0f} ms, {beside_s * 1e3:.0f} beside pictures, then", end=" ")
    print(f"{after_s * 1e3:.0f}")
    assert set(flood.outcomes) <= {200, 429, 503} and flood.outcomes[200] >= num_clients
    assert 0 < flood.most_pending <= PENDING_PATCHES
    assert flood.outcomes[429] + flood.outcomes[503] > 0
    assert beside_s <= 1.2 * max(before_s, after_s)
    await empty(lambda: held(flooded))


async def _answers_beside_held_pictures(
    flooded: Cluster, client: httpx.AsyncClient, num_clients: int = 20, num_texts: int = 40
) -> None:
    """The short form takes no time: no picture is encoded before all text has been answered."""
    flooded.slow_down(all=delays.HOLD)
    flood = Flood(flooded, client, num_clients)
    pictures = asyncio.create_task(flood.pictures(0.0))

    def pending() -> list[float]:
        return [node.metrics()["chiasm_encoder_pending_patches"] for node in flooded.encoders]

    # Half of them: others may show the same pictures.
    await eventually(lambda: sum(pending()) >= num_clients / 2 * PATCHES)
    texts = [body(text_part(f"Who are you? {i}"), salt="held") for i in range(num_texts)]
    told = await asyncio.gather(*(answer(client, flooded.url, text) for text in texts))
    assert all(told) and not flood.outcomes, "pictures were answered or refused"
    assert max(pending()) <= PENDING_PATCHES
    flooded.slow_down()
    await pictures
    assert flood.outcomes == {200: num_clients}
    await empty(lambda: held(flooded))
