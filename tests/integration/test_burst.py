"""Far more at once than one encoder and one decoder can take: every request is told what became
of it, in its time, and text gets by."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.integration import delays
from tests.integration.cluster import PATIENCE_S
from tests.integration.media import circle, image_part, text_part
from tests.integration.stack import Service, Stack

BURST, INFLIGHT, QUEUED = 200, 64, 80
QUEUE_S, DEADLINE_S = 120.0, 240.0
PICTURE_S = 0.5  # that the encoder takes while text is asked for
COLOURS = ("red", "green", "blue", "yellow", "orange", "purple")


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where it says whether the encoder is to hold on."""
    path = tmp_path_factory.mktemp("burst") / "delays.json"
    delays.write(path, {"all": delays.HOLD})
    return path


@pytest.fixture(scope="module")
def small(held: Path) -> Iterator[Service]:
    """One encoder with room for few patches, one decoder, and a gateway that lets few wait."""
    stack = Stack("demo", {delays.VARIABLE: str(held)})
    try:
        encoder = stack.start("tests.integration.delayed_encoder", "--max-pending-patches", "2000")
        decoder = stack.start("decoder_svc", "--max-running-requests", "8")
        for service in (encoder, decoder):
            service.wait_ready()
        flags = ["--encoder-urls", encoder.address, "--decoder-urls", decoder.address]
        flags += ["--max-inflight", str(INFLIGHT), "--max-queued", str(QUEUED)]
        flags += ["--queue-timeout-s", str(QUEUE_S)]
        flags += ["--request-timeout-s", str(DEADLINE_S)]
        yield stack.start("gateway", *flags).wait_in_use()
    finally:
        delays.write(held, {})
        stack.stop()


@dataclass(frozen=True)
class Told:
    """What a client got, and how long it took."""

    status: int
    retry_after: str
    seconds: float
    text: str


async def ask(client: httpx.AsyncClient, *parts: object) -> Told:
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": [*parts, text_part("What is in the picture?")]}],
        "temperature": 0,
        "max_tokens": 16,
    }
    began = time.monotonic()
    answer = await client.post("/v1/chat/completions", json=body)
    seconds = time.monotonic() - began
    return Told(answer.status_code, answer.headers.get("retry-after", ""), seconds, answer.text)


@pytest.mark.timeout(900)
async def test_200_pictures_at_once_are_all_answered_or_refused_in_time(
    small: Service, held: Path
) -> None:
    """None is encoded before all that find no room have been refused: it is a burst, however slow
    this machine. Text then comes while pictures wait, and does not wait for them."""
    parts = [image_part(circle(COLOURS[i % 6], (112 + i, 140))) for i in range(BURST)]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=f"http://{small.address}", timeout=2 * DEADLINE_S, limits=limits
    ) as client:
        burst = [asyncio.create_task(ask(client, part)) for part in parts]
        async with asyncio.timeout(PATIENCE_S):
            while sum(task.done() for task in burst) < BURST - INFLIGHT - QUEUED:
                await asyncio.sleep(0.02)
        delays.write(held, {"all": PICTURE_S})
        text = await asyncio.gather(*(ask(client) for _ in range(5)))
        before = Counter(task.result().status for task in burst if task.done())
        delays.write(held, {})
        told = await asyncio.gather(*burst)
        after = await ask(client, parts[0])
        metrics = (await client.get("/metrics")).text
    statuses = Counter(one.status for one in told)
    assert sum(statuses.values()) == BURST
    assert set(statuses) <= {200, 429, 503}, [one.text for one in told if one.status == 504][:1]
    assert statuses[200] > 40, statuses
    assert statuses[429] + statuses[503] >= BURST - INFLIGHT - QUEUED, statuses
    for one in told:
        assert one.seconds < DEADLINE_S
        if one.status != 200:
            assert int(one.retry_after) >= 1
    assert {one.status for one in text} == {200}
    assert before[200] < statuses[200] / 2, (before, statuses)
    print(f"{dict(statuses)}, {before[200]} of them answered before the last text")
    assert after.status == 200
    for name in ("chiasm_num_requests_waiting", "chiasm_media_bytes"):
        assert f"{name} 0.0" in metrics
