"""An engine with a sink that keeps what it is told."""

from __future__ import annotations

import asyncio
import threading

import numpy as np

from chiasm.plan import Cause, Span
from encoder_svc.engine import EncoderEngine, EngineLimits
from encoder_svc.messages import EncodeJob, EncodeStats, RowBuffer
from encoder_svc.work import Preprocessor
from tests.fake_runner import FakeRunner
from tests.waiting import DEADLINE_S, until


class RecordingSink:
    """Keeps what it is told, and checks who tells it."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.rows: dict[bytes, list[tuple[int, Span, np.ndarray]]] = {}
        self.done: dict[bytes, EncodeStats] = {}
        self.failures: dict[bytes, tuple[Cause, str]] = {}
        self.changed = asyncio.Event()

    def segment_ready(self, key: bytes, segment: int, rows: Span, buffer: RowBuffer) -> None:
        assert threading.get_ident() == self.thread and len(rows) == buffer.num_rows
        values = np.frombuffer(buffer.read(0, buffer.num_rows), np.float32)
        self.rows.setdefault(key, []).append((segment, rows, values.reshape(len(rows), -1)))
        self.changed.set()

    def finished(self, key: bytes, stats: EncodeStats) -> None:
        assert threading.get_ident() == self.thread
        self.done[key] = stats
        self.changed.set()

    def failed(self, key: bytes, cause: Cause, message: str) -> None:
        assert threading.get_ident() == self.thread
        self.failures[key] = (cause, message)
        self.changed.set()

    async def outcome(self, *keys: bytes) -> None:
        """Waits until each key has finished or failed."""
        async with asyncio.timeout(DEADLINE_S):
            while not all(key in self.done or key in self.failures for key in keys):
                self.changed.clear()
                await self.changed.wait()


class Bench:
    """An engine with its sink and runner."""

    def __init__(self, runner: FakeRunner, processor: Preprocessor, limits: EngineLimits) -> None:
        self.runner = runner
        self.sink = RecordingSink()
        self.engine = EncoderEngine(runner, processor, limits)
        self.engine.start(self.sink)

    async def held_back(self) -> None:
        """Waits until nothing happens any more, as the tower is told not to run."""
        engine = self.engine
        await until(lambda: engine._at_tower and not engine._batcher._preparing)

    async def encode(self, *jobs: EncodeJob) -> None:
        for one in jobs:
            self.engine.submit(one)
        await self.sink.outcome(*(one.key for one in jobs))
