"""Services killed, stopped, flooded and deserted under load: what users and metrics see of it.

One cluster for the whole file, healed between tests. Runs are kept apart by `cache_salt`: no cache
of one run serves another.
"""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from tests.integration.aborts import Deserter
from tests.integration.asking import (
    answer,
    answers,
    body,
    empty,
    eventually,
    open_client,
    pieces,
    unique,
)
from tests.integration.cluster import Cluster, Node, scrape, total
from tests.integration.media import circle, image_part, text_part
from tests.integration.residue import grown, held, resources

SHAPES = text_part("What is in the picture?")
NUM_PICTURES = 50
NUM_STREAMS = 20
NUM_ABORTS = 1000
BURST = 200
DELAY_S = 2.0  # of the second picture
TOKEN_S = 0.001  # of each token: all before the second picture take less than it does
CANCELLED = 'chiasm_encoder_requests_total{outcome="cancelled"}'

pytestmark = pytest.mark.timeout(150)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    flags = ("--max-pending-patches", "8000")  # few enough to be refused more
    running = Cluster(tmp_path_factory.mktemp("cluster"), encoder_flags=flags)
    try:
        yield running
    finally:
        running.close()


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with open_client() as http:
        yield http


async def test_text_and_the_first_picture_are_prefilled_while_the_second_is_encoded(
    cluster: Cluster, client: httpx.AsyncClient
) -> None:
    """Beside the same prompt with the slow picture in front, where nothing can be prefilled early.

    What counts of a request is its own timeline: from the slow picture's rows to the first token.
    What else this machine does only adds to it, so the least of each counts, until it shows.
    """
    cluster.slow_down(p256=DELAY_S, token=TOKEN_S)
    words = "The quick brown fox jumps over the lazy dog. " * 40
    prose, first, second = text_part(words), image_part(unique(1)), image_part(unique(2, 224))

    async def timings(salt: str, *parts: object) -> tuple[dict[str, float], int]:
        """The timeline, and the number of tokens of the prompt."""
        request = body(*parts, salt=salt, max_tokens=1, stream=False, return_timings=True)
        reply = (await client.post(f"{cluster.url}/v1/chat/completions", json=request)).json()
        return dict(reply["timings"]), int(reply["usage"]["prompt_tokens"])

    async def rest(salt: str, *parts: object) -> tuple[float, int]:
        """Milliseconds from the slow picture's rows to the first token, and as above."""
        await timings(salt, first)  # its rows are at hand from now on
        told, num_tokens = await timings(salt, *parts, SHAPES)
        assert told["encode"] >= DELAY_S * 1e3
        return told["first_token"] - told["fetch"] - told["plan"] - told["encode"], num_tokens

    async def num_waiting() -> float:
        samples = await asyncio.gather(*(asyncio.to_thread(d.metrics) for d in cluster.decoders))
        return sum(sample["chiasm_waiting_tokens"] for sample in samples)

    overlapped_ms = apart_ms = math.inf
    for attempt in range(5):
        running = asyncio.create_task(rest(f"overlap {attempt}", prose, first, second))
        waiting = []
        while not running.done():
            waiting.append(await num_waiting())
            await asyncio.sleep(0.1)
        took_ms, num_tokens = await running
        overlapped_ms = min(overlapped_ms, took_ms)
        took_ms, _ = await rest(f"apart {attempt}", second, prose, first)
        apart_ms = min(apart_ms, took_ms)
        # Only the second picture's rows and what follows them were left to prefill.
        left = min(tokens for tokens in waiting if tokens >= 64)
        assert left <= 64 + 64, waiting
        early_ms = (num_tokens - left) * TOKEN_S * 1e3
        if apart_ms - overlapped_ms >= early_ms:
            break
    print(f"overlap: {early_ms:.0f} ms prefilled early; {overlapped_ms:.0f} ms from the slow rows")
    print(f"to the first token, apart {apart_ms:.0f} ms; tokens that waited: {waiting}")
    assert early_ms > 1000
    assert apart_ms - overlapped_ms >= early_ms


async def test_a_burst_is_answered_or_refused_with_a_time_to_come_back(
    cluster: Cluster, client: httpx.AsyncClient
) -> None:
    """E01: one encoder, one decoder, 200 different pictures at once."""
    cluster.slow_down(all=0.05)
    ends = (cluster.encoders[:1], cluster.decoders[:1])
    gateway = cluster.start_gateway(*ends, "--queue-timeout-s", "2")  # who waits longer is refused
    url = f"http://{gateway.address}"
    await eventually(lambda: httpx.get(f"{url}/ready").json()["images"], 20)

    async def outcome(index: int) -> httpx.Response:
        request = body(image_part(unique(index, 224)), SHAPES, salt="burst", stream=False)
        return await client.post(f"{url}/v1/chat/completions", json=request)

    began = time.perf_counter()
    texts = [
        answer(client, url, body(text_part(f"Who are you? {i}"), salt="burst")) for i in range(20)
    ]
    replies, _ = await asyncio.gather(
        asyncio.gather(*(outcome(index) for index in range(BURST))), asyncio.gather(*texts)
    )
    took_s = time.perf_counter() - began
    gateway.kill(signal.SIGTERM)
    codes = Counter(reply.status_code for reply in replies)
    print("burst:", dict(codes), f"{took_s:.1f} s")
    assert codes[200] + codes[429] + codes[503] == BURST
    assert codes[200] >= 20 and codes[429] + codes[503] >= 20
    refused = [reply for reply in replies if reply.status_code != 200]
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
    assert took_s < 60
    assert gateway.process.wait(20) == 0


async def test_a_thousand_aborts_leave_nothing_behind(
    cluster: Cluster, client: httpx.AsyncClient
) -> None:
    """E05: before it is accepted, in encode, in transfer, in decode."""
    deserter = Deserter(cluster.gateway.address, seed=5)
    cached = [image_part(unique(index, 224)) for index in range(4)]

    def request(index: int, stage: str) -> dict[str, Any]:
        side = 140 if stage == "encode" else 112  # 100 patches, or 64
        picture = cached[index % 4] if stage == "transfer" else image_part(unique(index, side))
        lead = text_part(f"{index} of {stage}. ")
        return body(lead, picture, SHAPES, salt="aborts", max_tokens=64, ignore_eos=True)

    stages = deserter.stages(NUM_ABORTS)
    jobs = [body(picture, SHAPES, salt="aborts") for picture in cached * 12]
    before = await answers(cluster, client, jobs)  # warms every pool of threads, too
    await empty(lambda: held(cluster), 10)
    baseline = resources(cluster)
    cluster.slow_down(p100=0.1)
    counted = [node.metrics() for node in cluster.encoders]
    for at in range(0, NUM_ABORTS, 40):
        batch = list(enumerate(stages[at : at + 40], at))
        await asyncio.gather(*(deserter.abort(request(i, stage), stage) for i, stage in batch))
    aborted = sum(
        line.endswith(" aborted") for node in cluster.decoders for line in node.service.lines
    )
    cancelled = sum(
        node.metrics()[CANCELLED] - samples.get(CANCELLED, 0)
        for node, samples in zip(cluster.encoders, counted, strict=True)
    )
    print("aborts:", deserter.cut, "encodes:", cancelled, "in decoders:", aborted)
    assert min(deserter.cut.values()) >= NUM_ABORTS // 8
    assert cancelled >= NUM_ABORTS // 10 and aborted >= NUM_ABORTS // 10
    await empty(lambda: held(cluster), 15)
    await empty(lambda: grown(cluster, baseline), 15)
    again = [body(picture, SHAPES, salt="afterwards") for picture in cached]
    assert await answers(cluster, client, again) == before[:4]


async def test_twenty_streams_outlive_their_decoder(
    cluster: Cluster, client: httpx.AsyncClient
) -> None:
    cluster.heal()

    def request(index: int, salt: str) -> dict[str, Any]:
        parts = [text_part(f"Story {index}.")]
        parts += [image_part(unique(index)), SHAPES] if index % 2 else []
        warm = {"temperature": 0.8, "seed": index} if index % 4 > 1 else {}
        return body(*parts, salt=salt, max_tokens=160, ignore_eos=True, **warm)

    calm = await answers(cluster, client, [request(i, "calm") for i in range(NUM_STREAMS)])
    moved = total(cluster.metrics(), "chiasm_request_migrations_total")
    told = [0] * NUM_STREAMS

    async def follow(index: int) -> str:
        text = ""
        async for piece in pieces(client, cluster.url, request(index, "storm")):
            told[index] += 1
            text += piece
        return text

    streams = [asyncio.create_task(follow(index)) for index in range(NUM_STREAMS)]
    async with asyncio.timeout(30):
        while min(told) < 3:
            await asyncio.sleep(0.005)
    victim = max(cluster.decoders, key=lambda d: d.metrics()["chiasm_num_requests_running"])
    on_victim = victim.metrics()["chiasm_num_requests_running"]
    victim.kill()
    assert await asyncio.gather(*streams) == calm
    moved = total(cluster.metrics(), "chiasm_request_migrations_total") - moved
    print("decoder killed:", on_victim, "streams on it,", moved, "moved")
    assert on_victim >= 4 and moved >= 4


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_fifty_pictures_outlive_one_of_two_encoders(
    cluster: Cluster, client: httpx.AsyncClient, how: signal.Signals
) -> None:
    cluster.heal()

    def requests(salt: str) -> list[dict[str, Any]]:
        salt = f"{salt}-{how.name}"
        return [body(image_part(unique(i)), SHAPES, salt=salt) for i in range(NUM_PICTURES)]

    calm = await answers(cluster, client, requests("calm"))
    cluster.slow_down(all=0.3)
    moves = total(cluster.metrics(), "chiasm_encode_moves_total")
    done = {node.port: node.num_encoded() for node in cluster.encoders}
    running = asyncio.create_task(answers(cluster, client, requests("storm")))

    def num_done(node: Node) -> int:
        return node.num_encoded() - done[node.port]

    def num_open(node: Node) -> float:
        return node.metrics()["chiasm_encoder_open_encodes"]

    await eventually(lambda: sum(map(num_open, cluster.encoders)) > NUM_PICTURES / 2, 30)
    victim = max(cluster.encoders, key=num_open)
    await eventually(lambda: num_done(victim) >= 10, 30)
    on_victim = num_open(victim)
    victim.service.kill(how)
    began = time.perf_counter()
    assert await running == calm
    moves = total(cluster.metrics(), "chiasm_encode_moves_total") - moves
    took_s = time.perf_counter() - began
    print(f"encoder {how.name}: {on_victim} items on it, {moves} moved, {took_s:.1f} s to the end")
    assert on_victim >= 10 and moves >= 10
    victim.kill()


async def test_a_hedge_overtakes_an_encoder_that_hangs(
    cluster: Cluster, client: httpx.AsyncClient
) -> None:
    """Long before the encoder is known to hang: its load was told a moment ago."""
    cluster.heal()
    gateway = cluster.start_gateway(
        cluster.encoders, cluster.decoders[:1], "--hedge-after-s", "0.3"
    )
    url = f"http://{gateway.address}"
    await eventually(lambda: httpx.get(f"{url}/ready").text.count('"ready":true') == 4, 20)

    async def ask(salt: str) -> list[str]:
        requests = [body(image_part(unique(i)), SHAPES, salt=f"hedge-{salt}") for i in range(8)]
        return list(await asyncio.gather(*(answer(client, url, r) for r in requests)))

    calm = await ask("calm")
    victim = cluster.encoders[0].service
    victim.kill(signal.SIGSTOP)
    began = time.perf_counter()
    try:
        assert await ask("storm") == calm
    finally:
        victim.kill(signal.SIGCONT)
    took_s = time.perf_counter() - began
    samples = scrape(f"{url}/metrics")
    sent, won = (samples[f'chiasm_encode_hedges_total{{event="{e}"}}'] for e in ("sent", "won"))
    print(f"hedges: {sent} sent, {won} won, {took_s:.1f} s")
    assert sent >= won >= 1
    assert took_s < 4
    await empty(lambda: held(cluster), 15)
    gateway.kill(signal.SIGTERM)
    assert gateway.process.wait(20) == 0


async def test_a_decoder_without_encoders_serves_text_and_says_so(
    cluster: Cluster, client: httpx.AsyncClient
) -> None:
    def images() -> bool:
        return bool(httpx.get(f"{cluster.url}/ready").json()["images"])

    picture = body(image_part(circle("red")), SHAPES, salt="last", max_tokens=32)
    cluster.slow_down()
    for node in cluster.encoders:
        if node.alive:
            node.kill()
    await eventually(lambda: not images(), 15)
    ready = await client.get(f"{cluster.url}/ready")
    assert ready.status_code == 200 and ready.json()["text"]
    assert await answer(client, cluster.url, body(text_part("Who are you?"), salt="last"))
    refused = await client.post(f"{cluster.url}/v1/chat/completions", json=picture)
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    cluster.revive(cluster.encoders[0]).wait_ready()
    await eventually(images, 10)
    assert "red circle" in await answer(client, cluster.url, picture)
