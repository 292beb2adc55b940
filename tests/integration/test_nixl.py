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

pytestmark = pytest.mark.timeout(900)

PICTURE = sorted((Path(demo.__file__).parent / "pictures").glob("*.png"))[0]
TWO = ("--tp-size", "2", "--num-threads", "1", "--max-model-len", "512")


class Services:
    """One encoder, and decoders with a gateway each."""

    def __init__(self, *decoders: tuple[str, ...], hidden: bool = False) -> None:
        self.stack = Stack("demo", _without_nixl() if hidden else {})
        self.port = free_port()
        encoder = self.stack.start("encoder_svc", "--metrics-port", str(self.port))
        self.stack.env = {}
        self.decoders = [self.stack.start("decoder_svc", *flags) for flags in decoders]
        for service in (encoder, *self.decoders):
            service.wait_ready()
        self.gateways: list[Service] = []
        for decoder in self.decoders:
            urls = ("--encoder-urls", encoder.address, "--decoder-urls", decoder.address)
            self.gateways.append(self.stack.start("gateway", *urls))
        for gateway in self.gateways:
            gateway.wait_in_use()

    def ask(self, salt: str, which: int = 0) -> str:
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
        url = f"http://{self.gateways[which].address}/v1/chat/completions"
        reply = httpx.post(url, json=body, timeout=300)
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


NIXL, GRPC = ("--transport", "nixl"), ("--transport", "grpc")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory", "decoders"),
    [
        ("DRAM", (NIXL, (*NIXL, *TWO), (*NIXL, *TWO, "--slab-memory", "device"))),
        ("stream", (GRPC, (*GRPC, *TWO))),
    ],
    ids=["nixl", "grpc"],
)
def test_wire_bytes_do_not_depend_on_tensor_parallelism(
    services: list[Services], memory: str, decoders: tuple[tuple[str, ...], ...]
) -> None:
    """To host memory that the ranks share, and to the first rank's own, which it shares out."""
    each = Services(*decoders)
    services.append(each)
    answers, sent = set(), [0.0]
    for which in range(len(decoders)):
        answers.add(each.ask(f"salt {which}", which))
        assert each.sent().keys() == {memory}
        sent.append(each.sent()[memory])
    assert len(answers) == 1
    assert sent[1] and sent == [sent[1] * count for count in range(len(decoders) + 1)]


@pytest.mark.slow
def test_a_lost_rank_takes_rows_with_it_but_no_request(services: list[Services]) -> None:
    own = ("--transport", "nixl", "--slab-memory", "device")
    each = Services((*TWO, *own, "--kv-blocks", "64"))
    services.append(each)
    before = each.ask("before")
    os.kill(Family(each.decoders[0].process.pid).ranks[0], signal.SIGKILL)
    ready = f"http://{each.gateways[0].address}/ready"
    wait_for(lambda: httpx.get(ready, timeout=60).status_code != 200)
    wait_for(lambda: httpx.get(ready, timeout=60).status_code == 200)
    assert each.ask("after") == before
    assert each.sent().keys() == {"DRAM"} and not each.unwritten()


@pytest.mark.slow
def test_a_small_picture_is_not_worth_a_write_to_host_memory(services: list[Services]) -> None:
    each = Services(())
    services.append(each)
    each.ask("s")
    assert each.sent().keys() == {"stream"} and not each.unwritten()


@pytest.mark.slow
def test_where_one_side_has_no_nixl_rows_travel_over_grpc(services: list[Services]) -> None:
    each = Services((), hidden=True)
    services.append(each)
    each.ask("s")
    assert each.sent().keys() == {"stream"}
