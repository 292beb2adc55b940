"""The whole system with encoder and decoder on a GPU answers the shipped questions as on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from chiasm.demo import demo_cases
from tests.integration.media import data_uri
from tests.integration.stack import Service, Stack

pytestmark = pytest.mark.gpu
KINDS = {".png": "image/png", ".jpg": "image/jpeg", ".mp4": "video/mp4"}


@pytest.fixture(scope="module", params=["float32", "bfloat16"], name="gateway")
def gateway_(request: pytest.FixtureRequest) -> Iterator[Service]:
    stack = Stack("demo")
    flags = ("--device", "cuda", "--dtype", request.param)
    try:
        encoder = stack.start("encoder_svc", *flags)
        decoder = stack.start("decoder_svc", *flags, "--mem-fraction-static", "0.1")
        encoder.wait_ready(180)
        decoder.wait_ready(180)
        urls = ("--encoder-urls", encoder.address, "--decoder-urls", decoder.address)
        yield stack.start("gateway", *urls).wait_ready()
    finally:
        stack.stop()


def test_the_shipped_questions(gateway: Service) -> None:
    wrong = []
    with httpx.Client(base_url=f"http://{gateway.address}", timeout=60) as client:
        for case in demo_cases():
            content: list[dict[str, object]] = []
            for path in case.parts:
                kind = "video_url" if case.has_video else "image_url"
                url = {"url": data_uri(path.read_bytes(), KINDS[path.suffix])}
                content.append({"type": kind, kind: url})
            content.append({"type": "text", "text": case.question})
            body = {
                "model": "demo",
                "messages": [{"role": "user", "content": content}],
                "temperature": 0,
            }
            answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
            said = answer["choices"][0]["message"]["content"]
            if said != case.answer:
                wrong.append((case.title, said))
    assert wrong == []
