"""Health follows the engine: one that died ends the process, one that hangs is not ready."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from chiasm.errors import Internal
from decoder_svc import app
from tests.waiting import until


class FakeServer:
    def __init__(self) -> None:
        self.states: list[bool] = []
        self.lives: list[bool] = []

    async def ready(self, ready: bool) -> None:
        self.states.append(ready)

    async def live(self, live: bool) -> None:
        self.lives.append(live)


@pytest.fixture(autouse=True)
def quick_(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_WATCH_S", 0.01)


def watch(server: FakeServer, core: SimpleNamespace, thread: threading.Thread) -> Any:
    return app._until_over(cast("Any", server), cast("Any", core), thread)


async def test_a_dead_engine_is_an_error() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    with pytest.raises(Internal, match="engine has died"):
        core = SimpleNamespace(heartbeat=time.monotonic(), available=True)
        await watch(FakeServer(), core, thread)


async def test_a_hanging_engine_is_not_ready_until_it_beats_again() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    server = FakeServer()
    core = SimpleNamespace(heartbeat=time.monotonic() - 3600, available=True)
    watching = asyncio.create_task(watch(server, core, thread))
    try:
        await until(lambda: server.states == [False])
        core.heartbeat = time.monotonic()
        await until(lambda: server.states == [False, True])
        core.available = False  # its ranks are being started again
        await until(lambda: server.states == [False, True, False])
        assert server.lives == [False, True], "ranks that load are no reason to be killed"
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(watching, 60)
    finally:
        stop.set()
        thread.join()
