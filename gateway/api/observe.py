"""Measures a job from outside, as a user feels it. Both faces run their jobs through here."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from chiasm.telemetry import GatewayMetrics
from gateway.messages import ChatJob, Delta, Event, Job, JobDone, MediaPart


async def observed(
    job: Job, events: AsyncGenerator[Event, None], metrics: GatewayMetrics
) -> AsyncGenerator[Event, None]:
    """The same events. Latency of tokens is counted per choice and token."""
    arrived = time.perf_counter()
    last: dict[int, float] = {}
    observe_gap = metrics.inter_token_latency.observe
    with metrics.inflight.track_inprogress():
        async with aclosing(events):
            async for event in events:
                now = time.perf_counter()
                if isinstance(event, Delta):
                    before = last.get(event.choice)
                    if not last:
                        metrics.ttft.labels(_kind(job)).observe(now - arrived)
                    if before is not None:
                        tokens = max(1, len(event.token_ids))
                        observe_gap((now - before) / tokens, tokens)
                    last[event.choice] = now
                elif isinstance(event, JobDone):
                    metrics.prompt_tokens.inc(event.usage.prompt_tokens)
                    metrics.generation_tokens.inc(event.usage.completion_tokens)
                    metrics.e2e.observe(now - arrived)
                yield event


def _kind(job: Job) -> str:
    media = isinstance(job, ChatJob) and any(
        isinstance(part, MediaPart) for message in job.messages for part in message.parts
    )
    return "media" if media else "text"
