"""Starts the real services as processes and stops them, for integration tests."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_READY = re.compile(r"^chiasm-ready role=(\w+) address=(\S+)(?: grpc=(\S+))?")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@dataclass
class Service:
    """One child process and the lines it printed."""

    name: str
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    address: str = ""
    grpc: str = ""
    ready: threading.Event = field(default_factory=threading.Event)
    reader: threading.Thread | None = None

    def watch(self) -> None:
        """Reads output until the process ends."""
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.append(line.rstrip())
                if match := _READY.match(line):
                    self.address, self.grpc = match.group(2), match.group(3) or ""
                    self.ready.set()

    def wait_ready(self, timeout_s: float = 180.0) -> Service:
        """Blocks until the ready line; fails with the output if the process dies first."""
        deadline = time.monotonic() + timeout_s
        while not self.ready.wait(0.05):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} is not ready:\n" + "\n".join(self.lines[-40:]))
        return self

    def wait_in_use(self, timeout_s: float = 180.0) -> Service:
        """`wait_ready`, and until this gateway uses every peer that it was told of."""
        self.wait_ready(timeout_s)
        deadline = time.monotonic() + timeout_s
        while not (found := self._endpoints()) or not all(one["ready"] for one in found):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} does not use all of {found}")
            time.sleep(0.05)
        return self

    def _endpoints(self) -> list[dict[str, Any]]:
        try:
            with urllib.request.urlopen(f"http://{self.address}/ready", timeout=30) as reply:
                page = reply.read()
        except urllib.error.HTTPError as refusal:  # 503: none is in use
            with refusal:
                page = refusal.read()
        found: list[dict[str, Any]] = json.loads(page)["endpoints"]
        return found

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal."""
        self.process.send_signal(number)


def _inherited() -> dict[str, str]:
    """The environment without what is said to the tests: services refuse unknown CHIASM_ names."""
    return {k: v for k, v in os.environ.items() if not k.startswith("CHIASM_TEST_")}


class Stack:
    """Encoders, a decoder and a gateway over one checkpoint directory."""

    def __init__(self, model: str | Path, env: Mapping[str, str] | None = None) -> None:
        self.model = str(model)
        self.env = dict(env or {})
        self.prefix: tuple[str, ...] = ()  # before the command: where it is to run
        self.services: list[Service] = []

    def start(self, role: str, *flags: str) -> Service:
        """Starts `python -m <role>`; does not wait."""
        port = () if "--port" in flags else ("--port", "0")
        command = [*self.prefix, sys.executable, "-m", role, "--model", self.model, *port, *flags]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**_inherited(), **ONE_THREAD, **self.env},
        )
        service = Service(role, process)
        service.reader = threading.Thread(target=service.watch, daemon=True)
        service.reader.start()
        self.services.append(service)
        return service

    def start_all(self, encoders: int = 2, *gateway_flags: str) -> Service:
        """Starts everything and returns the gateway, which uses all of it."""
        workers = [self.start("encoder_svc") for _ in range(encoders)]
        workers.append(self.start("decoder_svc"))
        for worker in workers:
            worker.wait_ready()
        flags: list[str] = []
        for worker in workers[:-1]:
            flags += ["--encoder-urls", worker.address]
        flags += ["--decoder-urls", workers[-1].address]
        return self.start("gateway", *flags, *gateway_flags).wait_in_use()

    def stop(self) -> dict[str, int]:
        """SIGTERM to all, gateway first; returns exit codes by name and index."""
        codes: dict[str, int] = {}
        for service in reversed(self.services):
            if service.process.poll() is None:
                service.process.terminate()
        for index, service in enumerate(self.services):
            try:
                codes[f"{service.name}-{index}"] = service.process.wait(60)
            except subprocess.TimeoutExpired:
                service.process.kill()
                codes[f"{service.name}-{index}"] = service.process.wait(60)
            if service.reader is not None:
                service.reader.join(60)
        return codes
