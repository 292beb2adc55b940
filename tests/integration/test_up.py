"""`chiasm up` with the real services: supervision, and an end that leaves no process behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.cluster import PATIENCE_S

pytestmark = pytest.mark.timeout(400)
ROOT = Path(__file__).resolve().parents[2]


class Up:
    """A running `chiasm up` on free ports and its children, found through /proc."""

    def __init__(self, log: Path) -> None:
        self.log = log
        command = [sys.executable, "-m", "chiasm.cli", "up", "--port", "0", "--encoders", "1"]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "--drain-s", "3"], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
            )

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def url(self) -> str:
        wait_for(lambda: "Stop it with Ctrl-C" in self.output, "the services start")
        found = re.search(r"is served at (http://\S+)", self.output)
        assert found is not None
        return found[1]

    def children(self) -> dict[str, int]:
        """Pid by module."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if parent == self.process.pid and b"-m" in words:
                found[words[words.index(b"-m") + 1].decode()] = int(entry.name)
        return found


def wait_for(claim: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.05)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    running = Up(tmp_path / "log")
    yield running
    running.process.kill()
    running.process.wait()


def answers(url: str) -> bool:
    hello = {"role": "user", "content": "Hello"}
    try:
        models = httpx.get(f"{url}/v1/models", timeout=60, trust_env=False).json()
        request = {"model": models["data"][0]["id"], "messages": [hello], "max_tokens": 2}
        reply = httpx.post(f"{url}/v1/chat/completions", json=request, timeout=60, trust_env=False)
    except httpx.TransportError:
        return False
    return reply.status_code == 200


def test_a_dead_service_is_named_and_replaced_and_ctrl_c_ends_all(up: Up) -> None:
    url = up.url()
    wait_for(lambda: answers(url), "the first answer")
    before = up.children()
    assert set(before) == {"encoder_svc", "decoder_svc", "gateway"}
    for module, name in (("decoder_svc", "decoder"), ("gateway", "gateway")):
        os.kill(before[module], signal.SIGKILL)
        wait_for(lambda name=name: f"{name} is back" in up.output, f"{name} is back")  # type: ignore[misc]
        assert f"{name} died unexpectedly (killed by SIGKILL)" in up.output
    wait_for(lambda: answers(url), "the system answers again at the same address")
    after = up.children()
    assert after["encoder_svc"] == before["encoder_svc"], "the others kept running"
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(timeout=PATIENCE_S) == 0
    assert all(map(gone, after.values()))
    assert "Traceback" not in up.output


def test_no_service_outlives_a_killed_supervisor(up: Up) -> None:
    up.url()
    children = up.children()
    assert len(children) == 3
    up.process.kill()
    wait_for(lambda: all(map(gone, children.values())), "all services are gone")


def test_a_taken_port_is_said_before_anything_starts(up: Up) -> None:
    url = up.url()
    port = url.rpartition(":")[2]
    second = subprocess.run(
        [sys.executable, "-m", "chiasm.cli", "up", "--port", port],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert second.returncode == 1
    assert (
        second.stderr
        == f"chiasm: error: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    )
