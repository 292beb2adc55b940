"""Two slowable encoders, two decoders and a gateway: processes to be killed and revived."""

from __future__ import annotations

import functools
import random
import signal
import socket
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.integration import delays
from tests.integration.stack import Service, Stack

ENCODER_FLAGS = ("--max-batch-patches", "1")
"""One item a forward, so that delays are per item."""
PATIENCE_S = 90.0
"""For what must come true, on a machine however busy; no test says how soon it does."""


@dataclass
class Node:
    """A service with ports of its own for all its lives."""

    role: str
    port: int
    metrics_port: int
    service: Service

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        return self.service.process.poll() is None

    @property
    def pid(self) -> int:
        return self.service.process.pid

    def metrics(self) -> dict[str, float]:
        return scrape(f"http://127.0.0.1:{self.metrics_port}/metrics")

    def kill(self) -> None:
        self.service.kill(signal.SIGKILL)
        self.service.process.wait(60)

    def num_computed(self) -> int:
        """Tokens, by a decoder."""
        found = [line for line in self.service.lines if line.startswith("computed ")]
        return sum(int(line.split()[1]) for line in found)

    def num_encoded(self) -> int:
        return sum(line.startswith("encoded ") for line in self.service.lines)


class Cluster:
    """Owns the processes.

    Args:
        directory: For files of its own.
        num_each: Encoders, and as many decoders.
        encoder_flags: Beyond the usual ones.
    """

    def __init__(
        self, directory: Path, *, num_each: int = 2, encoder_flags: tuple[str, ...] = ()
    ) -> None:
        self._delays = directory / "delays.json"
        self._encoder_flags = (*ENCODER_FLAGS, *encoder_flags)
        self.slow_down()
        self.stack = Stack("demo", {delays.VARIABLE: str(self._delays)})
        with ExitStack() as undo:
            undo.callback(self.stack.stop)
            self.encoders = [self._node("encoder") for _ in range(num_each)]
            self.decoders = [self._node("decoder") for _ in range(num_each)]
            for node in (*self.encoders, *self.decoders):
                node.service.wait_ready()
            self.gateway = self.start_gateway(self.encoders, self.decoders)
            self.url = f"http://{self.gateway.address}"
            undo.pop_all()

    def start_gateway(self, encoders: list[Node], decoders: list[Node], *flags: str) -> Service:
        """Another gateway before some of the services."""
        urls = [("--encoder-urls", e.address) for e in encoders]
        urls += [("--decoder-urls", d.address) for d in decoders]
        return self.stack.start(
            "gateway", *(f for pair in urls for f in pair), *flags
        ).wait_in_use()

    def slow_down(self, **seconds: float) -> None:
        """Seconds per item: `all`, or by number of patches (p576=2.0); per token: `token`.

        What is being waited for already takes as long as is said now: `HOLD` stops it, and less
        lets it go.
        """
        named = {name.removeprefix("p"): value for name, value in seconds.items()}
        delays.write(self._delays, named)

    def heal(self) -> None:
        """Revives what is dead, at its old port, and waits for the gateway to have seen it."""
        self.slow_down()
        dead = [node for node in (*self.encoders, *self.decoders) if not node.alive]
        for node in dead:
            self.revive(node)
        for node in dead:
            node.service.wait_ready()
        self.until(lambda: self.num_ready() == self.num_nodes)

    def revive(self, node: Node) -> Service:
        """Starts the service again; does not wait."""
        node.service = self._start(node.role, node.port, node.metrics_port)
        return node.service

    @property
    def num_nodes(self) -> int:
        """Encoders and decoders, dead or alive."""
        return len(self.encoders) + len(self.decoders)

    def close(self) -> None:
        """Ends all, also what a test has stopped or held."""
        self.slow_down()
        for node in (*self.encoders, *self.decoders):
            if node.alive:
                node.service.kill(signal.SIGCONT)
        self.stack.stop()

    def num_ready(self) -> int:
        """Services that the gateway uses."""
        endpoints = httpx.get(f"{self.url}/ready", timeout=60).json()["endpoints"]
        return sum(endpoint["ready"] for endpoint in endpoints)

    def metrics(self) -> dict[str, float]:
        """The gateway's."""
        return scrape(f"{self.url}/metrics")

    @staticmethod
    def until(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
        """Polls; fails when it does not come true in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds:g} s"
            time.sleep(0.1)

    def _node(self, role: str) -> Node:
        port, metrics_port = free_port(), free_port()
        return Node(role, port, metrics_port, self._start(role, port, metrics_port))

    def _start(self, role: str, port: int, metrics_port: int) -> Service:
        ports = ("--port", str(port), "--metrics-port", str(metrics_port))
        flags = self._encoder_flags if role == "encoder" else ()
        return self.stack.start(f"tests.integration.delayed_{role}", *ports, *flags)


def scrape(url: str) -> dict[str, float]:
    """Samples by name and labels."""
    with urllib.request.urlopen(url, timeout=30) as reply:  # httpx would read certificates first
        lines = reply.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def total(samples: dict[str, float], name: str) -> float:
    """A metric's samples of all labels together."""
    return sum(v for k, v in samples.items() if k == name or k.startswith(name + "{"))


def free_port() -> int:
    """A TCP port nobody listens on, and that nobody else gets while this process lives.

    Below those that the kernel deals out. A UDP socket of the same number says to others who look
    for a port here, in any process, that it has been dealt out: a service binds it only later.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        mark = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            mark.bind(("127.0.0.1", port))
            with socket.socket() as probe:
                probe.bind(("", port))
        except OSError:
            mark.close()
            continue
        _marks().append(mark)
        return port


@functools.cache
def _marks() -> list[socket.socket]:
    """Of all ports dealt out by this process."""
    return []
