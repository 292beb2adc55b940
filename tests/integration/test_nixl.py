"""Rows by NIXL between the real services: what travels, what is shared, and what is left out."""

from __future__ import annotations

import base64
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from chiasm import demo
from tests.integration.cluster import free_port, scrape, total
from tests.integration.stack import Service, Stack
from tests.integration.test_lost_ranks import Family, wait_for

pytestmark = pytest.mark.timeout(300)

PICTURE = sorted((Path(demo.__file__).parent / "pictures").glob("*.png"))[0]
TWO = ("--tp-size", "2", "--num-threads", "1")


class Services:
    """One encoder, one decoder, one gateway."""

    def __init__(self, *decoder: str, encoder: tuple[str, ...] = (), hidden: bool = False) -> None:
        self.stack = Stack("demo", _without_nixl() if hidden else {})
        self.port = free_port()
        ports = ("--metrics-port", str(self.port))
        self.encoder = self.stack.start("encoder_svc", *ports, *encoder)
        self.stack.env = {}
        self.decoder = self.stack.start("decoder_svc", *decoder)
        self.encoder.wait_ready()
        self.decoder.wait_ready()
        urls = ("--encoder-urls", self.encoder.address, "--decoder-urls", self.decoder.address)
        self.gateway: Service = self.stack.start("gateway", *urls).wait_ready()

    def ask(self, salt: str = "s") -> str:
        data = base64.b64encode(PICTURE.read_bytes()).decode()
        content = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
            {"type": "text", "text": "What is in the picture?"},
        ]
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": 24,
            "cache_salt": salt,
        }
        url = f"http://{self.gateway.address}/v1/chat/completions"
        reply = httpx.post(url, json=body, timeout=120)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["message"]["content"])

    def sent(self) -> dict[str, float]:
        samples = scrape(f"http://127.0.0.1:{self.port}/metrics")
        name = "chiasm_encoder_transfer_bytes_total"
        return {k[len(name) + 9 : -2]: v for k, v in samples.items() if k.startswith(name)}

    def unwritten(self) -> float:
        samples = scrape(f"http://127.0.0.1:{self.port}/metrics")
        return total(samples, "chiasm_encoder_unwritten_grants_total")


def _without_nixl() -> dict[str, str]:
    """An environment in which the library cannot be imported."""
    return {"PYTHONPATH": str(Path(__file__).parent / "without_nixl")}


@pytest.fixture
def services() -> Iterator[list[Services]]:
    started: list[Services] = []
    yield started
    for each in started:
        codes = each.stack.stop()
        assert set(codes.values()) == {0}, codes


@pytest.mark.slow
def test_wire_bytes_do_not_depend_on_tensor_parallelism(services: list[Services]) -> None:
    """To host memory that the ranks share, and to the first rank's own, which it shares out."""
    answers, sent = set(), []
    for flags in ((), TWO, (*TWO, "--slab-memory", "device"), ("--slab-memory", "device")):
        each = Services("--transport", "nixl", *flags)
        services.append(each)
        answers.add(each.ask())
        sent.append(each.sent())
        services.remove(each)
        assert set(each.stack.stop().values()) == {0}
    assert len(answers) == 1
    assert all(s == sent[0] and s.keys() == {"DRAM"} for s in sent)


@pytest.mark.slow
def test_a_lost_rank_takes_rows_with_it_but_no_request(services: list[Services]) -> None:
    each = Services(*TWO, "--slab-memory", "device", "--kv-blocks", "64", "--max-model-len", "512")
    services.append(each)
    before = each.ask("before")
    os.kill(Family(each.decoder.process.pid).ranks[0], signal.SIGKILL)
    ready = f"http://{each.gateway.address}/ready"
    wait_for(lambda: httpx.get(ready).status_code != 200)
    wait_for(lambda: httpx.get(ready).status_code == 200)
    assert each.ask("after") == before
    assert each.sent().keys() == {"DRAM"} and not each.unwritten()


@pytest.mark.slow
def test_where_one_side_has_no_nixl_rows_travel_over_grpc(services: list[Services]) -> None:
    each = Services(hidden=True)
    services.append(each)
    each.ask()
    assert each.sent().keys() == {"stream"}
