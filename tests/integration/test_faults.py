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

from tests.integration import delays
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
from tests.integration.cluster import PATIENCE_S, Cluster, Node, scrape, total
from tests.integration.media import circle, image_part, text_part
from tests.integration.residue import grown, held, resources

SHAPES = text_part("What is in the picture?")
NUM_PICTURES = 50
NUM_STREAMS = 20
NUM_ABORTS = 1000
BURST = 200
TOKEN_S = 0.004  # of each token
STORM_TOKEN_S = 0.003  # the same, so that 160 tokens of ten streams take five seconds
ATTEMPTS = 8  # at what the rest of the machine may disturb
CANCELLED = 'chiasm_encoder_requests_total{outcome="cancelled"}'

pytestmark = pytest.mark.timeout(600)


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

    The slow picture's encode ends only when the decoders have computed all they can without its
    rows: how many tokens are left then is the claim, whatever the time. From there to the
    first token is each request's own timeline; what else this machine does only adds to it, so the
    least of each counts, until it shows.
    """
    words = "The quick brown fox jumps over the lazy dog. " * 40
    prose, first, second = text_part(words), image_part(unique(1)), image_part(unique(2, 224))

    async def timings(salt: str, *parts: object) -> tuple[dict[str, float], int]:
        """The timeline, and the number of tokens of the prompt."""
        request = body(*parts, salt=salt, max_tokens=1, stream=False, return_timings=True)
        reply = (await client.post(f"{cluster.url}/v1/chat/completions", json=request)).json()
        return dict(reply["timings"]), int(reply["usage"]["prompt_tokens"])

    def waiting() -> float:
        return sum(node.metrics()["chiasm_waiting_tokens"] for node in cluster.decoders)

    def computed() -> int:
        return sum(node.num_computed() for node in cluster.decoders)

    async def rest(salt: str, *parts: object, early: int) -> tuple[float, int]:
        """Milliseconds from the slow picture's rows to the first token, and how many tokens were
        left then: the picture is held until the others are computed."""
        cluster.slow_down(p256=delays.HOLD, token=TOKEN_S)
        await timings(salt, first)  # its rows are at hand from now on
        before = computed()
        running = asyncio.create_task(timings(salt, *parts, SHAPES))
        await eventually(lambda: waiting() >= 64 and computed() - before >= early)
        left = num_tokens - (computed() - before)
        assert not running.done()
        cluster.slow_down(token=TOKEN_S)
        told, _ = await running
        return told["first_token"] - told["fetch"] - told["plan"] - told["encode"], left

    cluster.slow_down()
    _, num_tokens = await timings("size", prose, first, second, SHAPES)
    overlapped_ms = apart_ms = math.inf
    for attempt in range(ATTEMPTS):
        # Only the second picture's rows and what follows them are left to prefill.
        took_ms, left = await rest(
            f"overlap {attempt}", prose, first, second, early=num_tokens - 64 - 64
        )
        overlapped_ms = min(overlapped_ms, took_ms)
        took_ms, all_left = await rest(f"apart {attempt}", second, prose, first, early=0)
        apart_ms = min(apart_ms, took_ms)
        early_ms = (all_left - left) * TOKEN_S * 1e3
        if apart_ms - overlapped_ms >= early_ms:
            break
    print(f"overlap: {early_ms:.0f} ms prefilled early; {overlapped_ms:.0f} ms from the slow rows")
    print(f"to the first token, apart {apart_ms:.0f} ms; {left} and {all_left} tokens left")
    assert left <= 64 + 64 and all_left - left > 1000
    assert apart_ms - overlapped_ms >= early_ms > 4000


async def test_a_burst_is_answered_or_refused_with_a_time_to_come_back(
    cluster: Cluster, client: httpx.AsyncClient
) -> None:
    """E01: one encoder, one decoder, 200 different pictures at once.

    None is encoded before 20 have been refused: it is a burst however slowly it comes.
    """
    cluster.slow_down(all=delays.HOLD)
    ends = (cluster.encoders[:1], cluster.decoders[:1])
    gateway = cluster.start_gateway(*ends, "--queue-timeout-s", "2")  # who waits longer is refused
    url = f"http://{gateway.address}"
    await eventually(lambda: httpx.get(f"{url}/ready", timeout=60).json()["images"])

    async def outcome(request: dict[str, Any]) -> httpx.Response:
        return await client.post(f"{url}/v1/chat/completions", json=request)

    requests = [
        body(image_part(unique(index, 224)), SHAPES, salt="burst", stream=False)
        for index in range(BURST)
    ]
    began = time.perf_counter()
    texts = [
        answer(client, url, body(text_part(f"Who are you? {i}"), salt="burst")) for i in range(20)
    ]
    pictures = [asyncio.create_task(outcome(request)) for request in requests]
    await asyncio.gather(*texts)
    async with asyncio.timeout(PATIENCE_S):
        while sum(task.done() for task in pictures) < 20:
            await asyncio.sleep(0.05)
    cluster.slow_down()
    replies = await asyncio.gather(*pictures)
    took_s = time.perf_counter() - began
    gateway.kill(signal.SIGTERM)
    codes = Counter(reply.status_code for reply in replies)
    print("burst:", dict(codes), f"{took_s:.1f} s")
    assert codes[200] + codes[429] + codes[503] == BURST
    assert codes[200] >= 20 and codes[429] + codes[503] >= 20
    refused = [reply for reply in replies if reply.status_code != 200]
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
    assert took_s < 60
    assert gateway.process.wait(PATIENCE_S) == 0


async def test_a_thousand_aborts_leave_nothing_behind(
    cluster: Cluster, client: httpx.AsyncClient
) -> None:
    """E05: before it is accepted, in encode, in transfer, in decode.

    Encodes are held until all that are to be left there have come to the encoders.
    """
    deserter = Deserter(cluster.gateway.address, seed=5)
    cached = [image_part(unique(index, 224)) for index in range(4)]

    def request(index: int, stage: str) -> dict[str, Any]:
        fresh = {"accept": 112, "encode": 140}  # 64 patches, or 100
        picture = image_part(unique(index, fresh[stage])) if stage in fresh else cached[index % 4]
        lead = text_part(f"{index} of {stage}. ")
        tokens = 256 if stage == "decode" else 64
        return body(lead, picture, SHAPES, salt="aborts", max_tokens=tokens, ignore_eos=True)

    def pending() -> float:
        return sum(node.metrics()["chiasm_encoder_pending_patches"] for node in cluster.encoders)

    async def batch(chosen: list[tuple[int, str]]) -> None:
        cluster.slow_down(p100=delays.HOLD)
        there = asyncio.Event()
        leaving: list[asyncio.Task[None]] = []
        encodes: list[asyncio.Task[None]] = []
        for index, stage in chosen:
            when = there if stage == "encode" else None
            task = asyncio.create_task(deserter.abort(request(index, stage), stage, when=when))
            (encodes if stage == "encode" else leaving).append(task)
        await eventually(lambda: pending() >= 100 * len(encodes))
        there.set()
        await asyncio.gather(*encodes)
        cluster.slow_down()
        await asyncio.gather(*leaving)

    stages = deserter.stages(NUM_ABORTS)
    jobs = [body(picture, SHAPES, salt="aborts") for picture in cached * 12]
    before = await answers(cluster, client, jobs)  # warms every pool of threads, too
    await empty(lambda: held(cluster))
    baseline = resources(cluster)
    counted = [node.metrics() for node in cluster.encoders]
    for at in range(0, NUM_ABORTS, 40):
        await batch(list(enumerate(stages[at : at + 40], at)))
    await empty(lambda: held(cluster))
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
    await empty(lambda: grown(cluster, baseline))
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
    cluster.slow_down(token=STORM_TOKEN_S)
    told = [0] * NUM_STREAMS

    async def follow(index: int) -> str:
        text = ""
        async for piece in pieces(client, cluster.url, request(index, "storm")):
            told[index] += 1
            text += piece
        return text

    streams = [asyncio.create_task(follow(index)) for index in range(NUM_STREAMS)]
    async with asyncio.timeout(PATIENCE_S):
        while min(told) < 3:
            await asyncio.sleep(0.005)
    cluster.slow_down(token=delays.HOLD)  # what runs on the victim runs until it is killed
    victim = max(cluster.decoders, key=lambda d: d.metrics()["chiasm_num_requests_running"])
    on_victim = victim.metrics()["chiasm_num_requests_running"]
    victim.kill()
    cluster.slow_down()
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
    cluster.slow_down(all=delays.HOLD)
    moves = total(cluster.metrics(), "chiasm_encode_moves_total")
    done = {node.port: node.num_encoded() for node in cluster.encoders}
    running = asyncio.create_task(answers(cluster, client, requests("storm")))

    def num_done(node: Node) -> int:
        return node.num_encoded() - done[node.port]

    def num_open(node: Node) -> float:
        return node.metrics()["chiasm_encoder_open_encodes"]

    await eventually(lambda: sum(map(num_open, cluster.encoders)) == NUM_PICTURES)
    victim = max(cluster.encoders, key=num_open)
    cluster.slow_down(all=1.0)
    await eventually(lambda: num_done(victim) >= 3)
    cluster.slow_down(all=delays.HOLD)  # the rest of them is on it until it ends
    on_victim = num_open(victim)
    victim.service.kill(how)
    cluster.slow_down(all=0.05)
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
    """Before the encoder is known to hang: its load was told a moment ago.

    It is known after four seconds. On a machine so busy that no hedge is through by then, again.
    """
    cluster.heal()
    gateway = cluster.start_gateway(
        cluster.encoders, cluster.decoders[:1], "--hedge-after-s", "0.3"
    )
    url = f"http://{gateway.address}"

    def all_are_used() -> bool:
        return httpx.get(f"{url}/ready", timeout=60).text.count('"ready":true') == 4

    def counted() -> tuple[float, float, float]:
        """Hedges sent and won, and encodes begun again."""
        samples = scrape(f"{url}/metrics")
        events = (f'chiasm_encode_hedges_total{{event="{e}"}}' for e in ("sent", "won"))
        sent, won = (samples.get(event, 0.0) for event in events)  # none is told of until one is
        return sent, won, total(samples, "chiasm_encode_moves_total")

    async def ask(salt: str) -> list[str]:
        requests = [body(image_part(unique(i)), SHAPES, salt=f"hedge-{salt}") for i in range(8)]
        return list(await asyncio.gather(*(answer(client, url, r) for r in requests)))

    await eventually(all_are_used)
    calm = await ask("calm")
    victim = cluster.encoders[0].service
    for attempt in range(ATTEMPTS):
        before = counted()
        victim.kill(signal.SIGSTOP)
        began = time.perf_counter()
        try:
            assert await ask(f"storm {attempt}") == calm
        finally:
            victim.kill(signal.SIGCONT)
        took_s = time.perf_counter() - began
        sent, won, moves = (now - then for now, then in zip(counted(), before, strict=True))
        print(f"hedges: {sent} sent, {won} won, {moves} moves, {took_s:.1f} s")
        if moves == 0:
            break
        await eventually(all_are_used)
    assert sent >= won >= 1 and moves == 0
    await empty(lambda: held(cluster))
    gateway.kill(signal.SIGTERM)
    assert gateway.process.wait(PATIENCE_S) == 0


async def test_a_decoder_without_encoders_serves_text_and_says_so(
    cluster: Cluster, client: httpx.AsyncClient
) -> None:
    def images() -> bool:
        return bool(httpx.get(f"{cluster.url}/ready", timeout=60).json()["images"])

    picture = body(image_part(circle("red")), SHAPES, salt="last", max_tokens=32)
    cluster.slow_down()
    for node in cluster.encoders:
        if node.alive:
            node.kill()
    await eventually(lambda: not images())
    ready = await client.get(f"{cluster.url}/ready")
    assert ready.status_code == 200 and ready.json()["text"]
    assert await answer(client, cluster.url, body(text_part("Who are you?"), salt="last"))
    refused = await client.post(f"{cluster.url}/v1/chat/completions", json=picture)
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
    cluster.revive(cluster.encoders[0]).wait_ready()
    await eventually(images)
    assert "red circle" in await answer(client, cluster.url, picture)
