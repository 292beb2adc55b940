"""Measures a job from outside, as a user feels it. Both faces run their jobs through here."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from chiasm.telemetry import GatewayMetrics
from gateway.messages import ChatJob, Delta, Event, Job, JobDone, MediaPart
from gateway.outlet import Outlet


async def observed(
    job: Job,
    events: AsyncGenerator[Event, None],
    metrics: GatewayMetrics,
    outlet: Outlet | None = None,
) -> AsyncGenerator[Event, None]:
    """The same events; what leaves by `outlet` is observed too."""
    watch = _Watch(job, metrics)
    if outlet is not None:
        outlet.watch(watch.delta)
    with metrics.inflight.track_inprogress():
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Delta):
                    watch.delta(event)
                elif isinstance(event, JobDone):
                    watch.done(event)
                yield event


class _Watch:
    """A stopwatch for one job."""

    def __init__(self, job: Job, metrics: GatewayMetrics) -> None:
        self._job = job
        self._metrics = metrics
        self._observe_gap = metrics.inter_token_latency.observe
        self._arrived = time.perf_counter()
        self._last: dict[int, float] = {}

    def delta(self, delta: Delta) -> None:
        """Latency of tokens is counted per choice and token."""
        now = time.perf_counter()
        last = self._last
        before = last.get(delta.choice)
        if before is not None:
            tokens = len(delta.token_ids) or 1
            self._observe_gap((now - before) / tokens, tokens)
        elif not last:
            self._metrics.ttft.labels(_kind(self._job)).observe(now - self._arrived)
        last[delta.choice] = now

    def done(self, done: JobDone) -> None:
        """The end."""
        self._metrics.prompt_tokens.inc(done.usage.prompt_tokens)
        self._metrics.generation_tokens.inc(done.usage.completion_tokens)
        self._metrics.e2e.observe(time.perf_counter() - self._arrived)


def _kind(job: Job) -> str:
    media = isinstance(job, ChatJob) and any(
        isinstance(part, MediaPart) for message in job.messages for part in message.parts
    )
    return "media" if media else "text"
