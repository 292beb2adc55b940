"""The encoder's engine: jobs in, segments of rows out. Two kinds of threads do the work.

A pool prepares patches while one runner thread runs the tower, so the next batch is made during the
forward of this one. Everything else, all policy and every call to the sink, happens on the event
loop's thread: no lock is needed and none is held.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from chiasm.errors import Cancelled, ChiasmError, InvalidMedia, InvalidRequest, TooLarge
from chiasm.plan import Cause, MediaPlan, Modality, Span
from encoder_svc.batcher import Batcher, Ticket
from encoder_svc.geometry import Run, Unit, resolve_run, segments_of
from encoder_svc.messages import EncodeJob, EncodeStats, RowBuffer, Sink
from encoder_svc.work import PreparedUnit, Preprocessor, RunFailure, Runner

logger = logging.getLogger(__name__)

T = TypeVar("T")
Outcome = tuple[RowBuffer, ...] | RunFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Sizes the engine works with; see `chiasm.config.EncoderConfig` for each."""

    max_batch_patches: int
    max_item_patches: int
    segment_rows: int
    preprocess_workers: int = 2


@dataclass(slots=True)
class _Job:
    """A job in flight. `number` tells it from an earlier one of the same key."""

    number: int
    job: EncodeJob
    units: tuple[Unit, ...]
    prepared: Iterator[PreparedUnit]
    cancelled: threading.Event
    waiting_since: float
    next_row: int
    next_segment: int = 0
    ready_units: dict[int, PreparedUnit] = field(default_factory=dict)
    queue_s: float = 0.0
    preprocess_s: float = 0.0
    forward_s: float = 0.0
    substituted: int = 0

    def stats(self) -> EncodeStats:
        return EncodeStats(
            queue_ms=self.queue_s * 1e3,
            preprocess_ms=self.preprocess_s * 1e3,
            forward_ms=self.forward_s * 1e3,
            substituted_frames=self.substituted,
        )


class EncoderEngine:
    """Orchestrates preprocessing and forwards; implements `encoder_svc.messages.Engine`.

    Args:
        runner: Runs the tower; used from one dedicated thread.
        processor: Makes patches; used from the pool's threads.
        limits: Budgets.

    Raises:
        ValueError: Processor files and tower disagree about the size of a patch.
    """

    def __init__(self, runner: Runner, processor: Preprocessor, limits: EngineLimits) -> None:
        if runner.geometry != processor.geometry:
            raise ValueError(
                f"the processor cuts {processor.geometry}, the tower reads {runner.geometry}"
            )
        self._runner = runner
        self._processor = processor
        self._limits = limits
        self._batcher = Batcher(
            max_batch_patches=limits.max_batch_patches, max_preparing=limits.preprocess_workers
        )
        self._pool = ThreadPoolExecutor(limits.preprocess_workers, thread_name_prefix="pixels")
        self._tower = ThreadPoolExecutor(1, thread_name_prefix="tower")
        self._jobs: dict[int, _Job] = {}
        self._numbers: dict[bytes, int] = {}
        self._next_number = 0
        self._sink: Sink | None = None
        self._at_tower = 0  # batches that run, or wait for the one that does
        self._inflight: set[asyncio.Future[None]] = set()

    @property
    def pending_patches(self) -> int:
        """See `encoder_svc.messages.Engine`."""
        return self._batcher.pending_patches

    def start(self, sink: Sink) -> None:
        """Names the one who is told. Call once, on the event loop's thread, before `submit`."""
        assert self._sink is None
        self._sink = sink

    def check(self, plan: MediaPlan, frames: Span | None, rows: Span) -> int:
        """See `encoder_svc.messages.Engine`."""
        patches = self._resolve(plan, frames, rows).patches
        if patches > self._limits.max_item_patches:
            raise TooLarge(
                f"{patches} patches are more than the {self._limits.max_item_patches} of one item"
            )
        return patches

    def segments(self, plan: MediaPlan, frames: Span | None, rows: Span) -> tuple[Span, ...]:
        """See `encoder_svc.messages.Engine`."""
        units = self._resolve(plan, frames, rows).units()
        counts = [self._runner.geometry.rows(unit.patches) for unit in units]
        return segments_of(counts, first=rows.begin, most=self._limits.segment_rows)

    def submit(self, job: EncodeJob) -> None:
        """See `encoder_svc.messages.Engine`."""
        assert self._sink is not None and job.key not in self._numbers
        units = self._resolve(job.plan, job.frames, job.rows).units()
        self._next_number += 1
        number, cancelled = self._next_number, threading.Event()
        self._numbers[job.key] = number
        self._jobs[number] = _Job(
            number=number,
            job=job,
            units=units,
            prepared=self._processor.prepare(job, units, cancelled),
            cancelled=cancelled,
            waiting_since=time.monotonic(),
            next_row=job.rows.begin,
        )
        self._batcher.add(
            number,
            [unit.patches for unit in units],
            priority=job.priority,
            alone=job.plan.modality is Modality.VIDEO,
        )
        self._pump()

    def cancel(self, key: bytes) -> None:
        """See `encoder_svc.messages.Engine`."""
        number = self._numbers.get(key)
        if number is not None:
            self._forget(self._jobs[number])
            self._pump()

    async def stop(self) -> None:
        """Drops every job without telling the sink, and waits for the threads to end."""
        for job in list(self._jobs.values()):
            self._forget(job)
        while self._inflight:
            await asyncio.wait(self._inflight)
        self._pool.shutdown(wait=False)
        self._tower.shutdown(wait=False)

    def _resolve(self, plan: MediaPlan, frames: Span | None, rows: Span) -> Run:
        if plan.family != self._runner.family:
            raise InvalidRequest(
                f"a plan of family {plan.family!r} for a tower of {self._runner.family!r}"
            )
        return resolve_run(self._runner.geometry, plan, frames, rows)

    def _pump(self) -> None:
        """Starts whatever may start now. Called after everything that changes the queue."""
        while (ticket := self._batcher.next_to_prepare()) is not None:
            self._spawn(self._prepare(ticket, self._jobs[ticket.job]))
        while self._tower_takes_more() and (batch := self._batcher.take_batch()):
            self._at_tower += 1
            jobs = [self._jobs[ticket.job] for ticket in batch]
            units = [job.ready_units.pop(t.unit) for job, t in zip(jobs, batch, strict=True)]
            self._spawn(self._forward(batch, jobs, units))

    def _tower_takes_more(self) -> bool:
        """A full batch may wait in the tower's thread: the tower then never waits for this one."""
        return not self._at_tower or (self._at_tower == 1 and self._batcher.batch_is_full())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._inflight.add(task)
        task.add_done_callback(self._inflight.discard)

    async def _prepare(self, ticket: Ticket, job: _Job) -> None:
        began = time.monotonic()
        if not ticket.unit:
            job.queue_s += began - job.waiting_since
        outcome = await self._in_thread(self._pool, partial(_next_unit, job))
        job.waiting_since = time.monotonic()
        job.preprocess_s += job.waiting_since - began
        if isinstance(outcome, Exception) and job.number in self._jobs:
            self._fail(job, *_blame(outcome))
        if self._batcher.prepared(ticket):
            assert isinstance(outcome, PreparedUnit)
            job.ready_units[ticket.unit] = outcome
            job.substituted += outcome.substituted_frames
        self._pump()

    async def _forward(
        self, batch: Sequence[Ticket], jobs: Sequence[_Job], units: Sequence[PreparedUnit]
    ) -> None:
        began = time.monotonic()
        for ticket, job in zip(batch, jobs, strict=True):
            job.queue_s += 0.0 if ticket.unit else began - job.waiting_since
        outcomes, elapsed = await self._run(units)
        waited = time.monotonic() - began - elapsed
        self._at_tower -= 1
        for ticket, job, outcome in zip(batch, jobs, outcomes, strict=True):
            job.queue_s += 0.0 if ticket.unit else waited
            job.forward_s += elapsed
            self._deliver(ticket, job, outcome)
        self._pump()

    async def _run(self, units: Sequence[PreparedUnit]) -> tuple[Sequence[Outcome], float]:
        """One batch through the tower, and its seconds; if it raises, its units one by one."""
        run = partial(self._runner.run, units, segment_rows=self._limits.segment_rows)
        found = await self._in_thread(self._tower, partial(_timed, run))
        if not isinstance(found, Exception):
            return found
        logger.error("a forward of %s units failed", len(units), exc_info=found)
        if len(units) == 1:
            return [RunFailure("the vision tower failed")], 0.0
        alone = [await self._run([unit]) for unit in units]
        return [one for outcomes, _ in alone for one in outcomes], sum(s for _, s in alone)

    def _deliver(self, ticket: Ticket, job: _Job, outcome: Outcome) -> None:
        if not self._batcher.ran(ticket):
            return  # cancelled or failed during its forward
        assert self._sink is not None
        expected = self._runner.geometry.rows(ticket.patches)
        if isinstance(outcome, RunFailure):
            self._fail(job, Cause.LOST, outcome.message)
            return
        if sum(buffer.num_rows for buffer in outcome) != expected:
            self._fail(job, Cause.LOST, "the vision tower made a wrong number of rows")
            return
        for buffer in outcome:
            rows = Span(job.next_row, job.next_row + buffer.num_rows)
            segment = job.next_segment
            job.next_row, job.next_segment = rows.end, segment + 1
            self._sink.segment_ready(job.job.key, segment, rows, buffer)
            if job.number not in self._jobs:
                return  # the sink cancelled it
        if ticket.unit + 1 == len(job.units):
            self._forget(job)
            self._sink.finished(job.job.key, job.stats())

    def _fail(self, job: _Job, cause: Cause, message: str) -> None:
        assert self._sink is not None
        self._forget(job)
        self._sink.failed(job.job.key, cause, message)

    def _forget(self, job: _Job) -> None:
        job.cancelled.set()
        job.ready_units.clear()
        self._batcher.drop(job.number)
        del self._jobs[job.number], self._numbers[job.job.key]

    async def _in_thread(self, pool: ThreadPoolExecutor, call: Callable[[], T]) -> T | Exception:
        """The call's value, or what it raised: the step loop's one catch-all."""
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, call)
        except Exception as error:
            return error


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    """Runs in the tower's thread: a batch may have waited there for the one before."""
    began = time.monotonic()
    return call(), time.monotonic() - began


def _next_unit(job: _Job) -> PreparedUnit:
    """Runs in a pool thread."""
    if job.cancelled.is_set():
        raise Cancelled("nobody waits for this medium any more")
    unit = next(job.prepared, None)
    assert unit is not None, "the processor yielded fewer units than asked for"
    return unit


def _blame(error: Exception) -> tuple[Cause, str]:
    if isinstance(error, TooLarge):
        return Cause.TOO_LARGE, error.message
    if isinstance(error, InvalidMedia):
        return Cause.INVALID_MEDIA, error.message
    if not isinstance(error, ChiasmError):
        logger.error("preprocessing failed", exc_info=error)
    return Cause.LOST, "preprocessing failed"
