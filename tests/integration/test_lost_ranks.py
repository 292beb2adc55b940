"""A decoder of several ranks in front of clients: one rank is killed, nobody notices but health."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from chiasm.v1 import common_pb2, decoder_pb2_grpc
from tests.integration import delays
from tests.integration.cluster import PATIENCE_S, free_port
from tests.integration.stack import Service, Stack

pytestmark = pytest.mark.timeout(600)

QUESTION = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is in the picture?"}],
    "temperature": 0,
    "max_tokens": 60,
    "ignore_eos": True,
    "stream": True,
}
DECODER = "tests.integration.delayed_decoder"
TOKEN_S = 0.1  # of each token, until the tenth has been read: the answer is far from over then
FLAGS = ("--num-threads", "1", "--kv-blocks", "64", "--max-model-len", "512")


class Family:
    """A process and what descends from it, as /proc shows them."""

    def __init__(self, root: int) -> None:
        parents: dict[int, int] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and (fields := _stat(int(entry.name))):
                parents[int(entry.name)] = int(fields[1])
        self.children = [pid for pid, parent in parents.items() if parent == root]
        self.ranks = sorted(pid for pid, parent in parents.items() if parent in self.children)

    @property
    def gone(self) -> bool:
        return all(_stat(pid) is None for pid in (*self.children, *self.ranks))


def _stat(pid: int) -> list[str] | None:
    """State, parent, ...; None when there is no such process or it is only waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields


def wait_for(condition: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s"
        time.sleep(0.05)


class Pace:
    """Of the decoders."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.set(0.0)

    def set(self, token_s: float) -> None:
        """Seconds for each token, from now on."""
        delays.write(self.file, {"token": token_s})


@pytest.fixture
def pace(tmp_path: Path) -> Pace:
    return Pace(tmp_path / "delays.json")


@pytest.fixture
def stack(pace: Pace) -> Iterator[Stack]:
    running = Stack("demo", {delays.VARIABLE: str(pace.file)})
    try:
        yield running
    finally:
        running.stop()


def serve(stack: Stack, decoder: Service) -> str:
    encoder = stack.start("encoder_svc")
    urls = ("--encoder-urls", encoder.wait_ready().address)
    urls += ("--decoder-urls", decoder.wait_ready().address)
    return f"http://{stack.start('gateway', *urls).wait_in_use().address}"


def answer(url: str, *, at_tenth: Callable[[], None] | None = None) -> str:
    """The whole streamed text; something happens once its tenth piece is there."""
    pieces: list[str] = []
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=QUESTION, timeout=180) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                pieces.append(choice["delta"].get("content") or "")
            if len(pieces) == 10 and at_tenth is not None:
                at_tenth()
    return "".join(pieces)


def epoch(decoder: Service) -> int:
    with grpc.insecure_channel(decoder.address) as channel:
        stub = decoder_pb2_grpc.DecoderStub(channel)
        return int(stub.Describe(common_pb2.DescribeRequest(), timeout=60).epoch)


def is_ready(url: str) -> bool:
    return httpx.get(f"{url}/ready", timeout=60).status_code == 200


def test_a_killed_rank_is_a_pause_to_clients_and_unready_to_the_cluster(
    stack: Stack, pace: Pace
) -> None:
    decoder = stack.start(DECODER, "--pp-size", "2", *FLAGS)
    url = serve(stack, decoder)
    expected, before = answer(url), epoch(decoder)
    family = Family(decoder.process.pid)
    assert len(family.ranks) == 2

    def kill() -> None:
        os.kill(family.ranks[1], signal.SIGKILL)
        wait_for(lambda: not is_ready(url))
        pace.set(0.0)

    pace.set(TOKEN_S)
    assert answer(url, at_tenth=kill) == expected
    wait_for(lambda: is_ready(url))
    assert epoch(decoder) > before
    assert answer(url) == expected

    family = Family(decoder.process.pid)
    assert len(family.ranks) == 2
    decoder.kill()
    wait_for(lambda: family.gone)  # nobody is left behind, however it ended


def test_ranks_of_another_host_serve_and_come_back(
    stack: Stack, pace: Pace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("a secret of some length")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("NNODES", "2")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    flags = ("--pp-size", "2", *FLAGS, "--rank-token-file", str(token))
    monkeypatch.setenv("NODE_RANK", "1")
    node = stack.start(DECODER, *flags)
    monkeypatch.setenv("NODE_RANK", "0")
    decoder = stack.start(DECODER, *flags)
    url = serve(stack, decoder)
    expected = answer(url)
    ranks = Family(node.process.pid).ranks
    assert len(ranks) == 1 and len(Family(decoder.process.pid).ranks) == 1

    def kill() -> None:
        os.kill(ranks[0], signal.SIGKILL)
        pace.set(0.0)

    pace.set(TOKEN_S)
    assert answer(url, at_tenth=kill) == expected
    family = Family(node.process.pid)
    assert len(family.ranks) == 1 and family.ranks != ranks

    node.kill()
    wait_for(lambda: family.gone)  # also where the engine lives elsewhere
    monkeypatch.setenv("NODE_RANK", "1")
    back = stack.start(DECODER, *flags)
    wait_for(lambda: is_ready(url) and len(Family(back.process.pid).ranks) == 1)
    assert answer(url) == expected
    family = Family(back.process.pid)
    codes = stack.stop()
    assert sorted(codes.values()) == [-9] + [0] * (len(codes) - 1), codes
    assert family.gone
