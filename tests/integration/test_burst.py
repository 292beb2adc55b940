"""Far more at once than one encoder and one decoder can take: every request is told what became
of it, in its time, and text gets by."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from tests.integration.media import circle, image_part, text_part
from tests.integration.stack import Service, Stack

BURST = 200
DEADLINE_S = 60.0
COLOURS = ("red", "green", "blue", "yellow", "orange", "purple")


@pytest.fixture(scope="module")
def small() -> Iterator[Service]:
    """One encoder with room for few patches, one decoder, and a gateway that lets few wait."""
    stack = Stack("demo")
    try:
        encoder = stack.start("encoder_svc", "--max-pending-patches", "2000")
        decoder = stack.start("decoder_svc", "--max-running-requests", "8")
        for service in (encoder, decoder):
            service.wait_ready()
        flags = ["--encoder-urls", encoder.address, "--decoder-urls", decoder.address]
        flags += ["--max-inflight", "64", "--max-queued", "80", "--queue-timeout-s", "30"]
        flags += ["--request-timeout-s", str(DEADLINE_S)]
        yield stack.start("gateway", *flags).wait_ready()
    finally:
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


@pytest.mark.timeout(240)
async def test_200_pictures_at_once_are_all_answered_or_refused_in_time(small: Service) -> None:
    parts = [image_part(circle(COLOURS[i % 6], (112 + i, 140))) for i in range(BURST)]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=f"http://{small.address}", timeout=2 * DEADLINE_S, limits=limits
    ) as client:
        burst = [asyncio.create_task(ask(client, part)) for part in parts]
        await asyncio.sleep(0.5)
        text = await asyncio.gather(*(ask(client) for _ in range(5)))
        told = await asyncio.gather(*burst)
        after = await ask(client, parts[0])
        metrics = (await client.get("/metrics")).text
    statuses = Counter(one.status for one in told)
    assert sum(statuses.values()) == BURST
    assert set(statuses) <= {200, 429, 503}, [one.text for one in told if one.status == 504][:1]
    assert statuses[200] > 40, statuses
    assert statuses[429] + statuses[503] >= BURST - 64 - 80, statuses
    for one in told:
        assert one.seconds < DEADLINE_S
        if one.status != 200:
            assert int(one.retry_after) >= 1
    # Text came while pictures waited, and did not wait for them.
    answered = sorted(one.seconds for one in told if one.status == 200)
    assert {one.status for one in text} == {200}
    assert max(one.seconds for one in text) < answered[len(answered) // 2]
    assert after.status == 200
    for name in ("chiasm_num_requests_waiting", "chiasm_media_bytes"):
        assert f"{name} 0.0" in metrics
