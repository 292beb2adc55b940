"""A decoder over two hosts, an encoder on a third, a gateway on a fourth; a cable is pulled.

The hosts are network namespaces: nothing but TCP over the switch joins them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from chiasm.cli.client import user_message
from chiasm.demo import demo_cases
from tests.integration.cluster import Cluster
from tests.integration.nodes import INTERFACE, Network, NotPermitted
from tests.integration.stack import Service, Stack

pytestmark = pytest.mark.timeout(900)

CUT_S = 20.0
FLAGS = ("--num-threads", "1", "--kv-blocks", "64", "--max-model-len", "1024")
TYPED = {"service_unavailable_error", "timeout_error"}


class Site:
    """Four hosts and what runs on them."""

    def __init__(self, network: Network, directory: Path) -> None:
        self.network = network
        self.hosts = {name: network.add(name) for name in ("a", "b", "enc", "gw")}
        self.stack = Stack("demo")
        token = directory / "token"
        token.write_text("a secret of some length")
        flags = ("--pp-size", "2", *FLAGS, "--rank-token-file", str(token))
        group = {"MASTER_ADDR": self.hosts["a"].address, "NNODES": "2", "MASTER_PORT": "29500"}
        self.stack.env |= group | {"GLOO_SOCKET_IFNAME": INTERFACE}
        started = {
            "enc": self._start("enc", "encoder_svc"),
            "b": self._start("b", "decoder_svc", *flags, node="1"),
            "a": self._start("a", "decoder_svc", *flags, node="0"),
        }
        peers = [f"--encoder-urls={self.hosts['enc'].address}:50051"]
        peers += [f"--decoder-urls={self.hosts['a'].address}:50051"]
        for name in ("enc", "a"):
            started[name].wait_ready()
        started["gw"] = self._start("gw", "gateway", *peers, port="8000").wait_ready()
        self.services = started
        self.url = f"http://{self.hosts['gw'].address}:8000"
        self.until_ready()

    def until_ready(self) -> None:
        """Waits until text and pictures are served."""
        Cluster.until(lambda: httpx.get(f"{self.url}/ready", timeout=60).json()["images"])

    def _start(
        self, host: str, role: str, *flags: str, node: str = "0", port: str = "50051"
    ) -> Service:
        self.stack.prefix = self.hosts[host].prefix
        self.stack.env["NODE_RANK"] = node
        address = ("--host", "0.0.0.0", "--advertise-host", self.hosts[host].address)
        return self.stack.start(role, *address, "--port", port, *flags)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    try:
        network = Network()
    except NotPermitted as reason:
        pytest.skip(str(reason))
    found = None
    try:
        found = Site(network, tmp_path_factory.mktemp("site"))
        yield found
    finally:
        if found is not None:
            found.stack.stop()
        network.close()


@dataclass
class Client:
    """Asks one thing after another until it is told to stop."""

    url: str
    message: dict[str, Any]
    right: str
    answers: int = 0
    errors: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    _ending: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        assert self._thread is not None
        self._ending.set()
        self._thread.join(300)
        assert not self._thread.is_alive(), "a request hangs"

    def _run(self) -> None:
        for number in count():
            if self._ending.wait(0.2):
                return
            began = time.monotonic()
            try:
                reply = ask(self.url, self.message, salt=f"{id(self)}-{number}")
            except httpx.HTTPError as error:
                self.problems.append(repr(error))
                continue
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            if reply.status_code == 200 and text_of(reply) == self.right:
                self.answers += 1
            elif reply.status_code in (503, 504) and reply.json()["error"]["type"] in TYPED:
                self.errors.append(reply.json()["error"]["message"])
            else:
                self.problems.append(f"{reply.status_code} {reply.text[:300]}")


def ask(url: str, message: dict[str, Any], *, salt: str) -> httpx.Response:
    body = {"model": "demo", "messages": [message], "temperature": 0, "max_tokens": 32}
    body |= {"cache_salt": salt}  # nothing is at hand from before
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=240)


def text_of(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


def test_the_demos_answers_are_right_over_four_hosts(site: Site) -> None:
    wrong = []
    for case in demo_cases():
        reply = ask(site.url, user_message(case.parts, case.question), salt="demo")
        if text_of(reply) != case.answer:
            wrong.append((case.title, text_of(reply)))
    assert not wrong


@pytest.mark.parametrize(
    ("host", "within_s"),
    [
        ("enc", 20.0),  # silence is noticed after four seconds, and who does not answer is left
        ("b", 90.0),  # the ranks are given up after 20 s, and requests wait for others
        ("a", 90.0),
    ],
)
def test_a_cable_is_pulled_for_twenty_seconds(site: Site, host: str, within_s: float) -> None:
    """Every request ends in time, well or with a word of why; what was cut off is used again."""
    circle = next(case for case in demo_cases() if "circle" in case.answer and not case.has_video)
    words = user_message((), "What is in the picture?")
    pictures = Client(site.url, user_message(circle.parts, circle.question), circle.answer)
    texts = Client(site.url, words, text_of(ask(site.url, words, salt="words")))
    clients = (pictures, texts)
    for client in clients:
        client.start()
    try:
        Cluster.until(lambda: all(client.answers for client in clients))
        site.network.cut(site.hosts[host])
        time.sleep(CUT_S)
        if host == "enc":
            Cluster.until(lambda: pictures.errors)
        site.network.mend(site.hosts[host])
        mended = time.monotonic()
        before = [client.answers for client in clients]
        Cluster.until(
            lambda: all(c.answers > b + 1 for c, b in zip(clients, before, strict=True)), 300
        )
        back_s = time.monotonic() - mended
    finally:
        for client in clients:
            client.stop()
    for name, client in (("pictures", pictures), ("texts", texts)):
        print(
            f"{host}: {name}: {client.answers} right, {len(client.errors)} errors, "
            f"slowest {client.slowest_s:.1f} s, back after {back_s:.1f} s: {set(client.errors)}"
        )
        assert not client.problems
        assert client.slowest_s < within_s
    if host == "enc":
        assert pictures.errors and not texts.errors, "texts need no encoder"
    assert all(service.process.poll() is None for service in site.services.values())
