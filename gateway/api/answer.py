"""Runs jobs for a REST request and answers: one JSON object, or a stream of events."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import fields, replace

from starlette.requests import Request
from starlette.responses import Response

from chiasm.errors import Internal
from gateway.api.disconnect import cancelled_when_gone
from gateway.api.face import Face
from gateway.api.jobs import Caller
from gateway.api.observe import observed
from gateway.api.sse import EventStream, Frames
from gateway.api.wire import Choice, Wire
from gateway.messages import ChoiceDone, Delta, Event, Job, JobDone, Timings, Usage
from gateway.outlet import Outlet

Events = AsyncGenerator[Event, None]


def face_of(request: Request) -> Face:
    """What the application was built with."""
    face = request.app.state.face
    assert isinstance(face, Face)
    return face


def caller_of(request: Request) -> Caller:
    """Who asks. The job's id begins with the request's, and is unique even if that is not."""
    return Caller(
        request_id=f"{request.state.request_id}-{secrets.token_hex(4)}",
        tenant=request.state.tenant,
        traceparent=request.headers.get("traceparent", ""),
        tracestate=request.headers.get("tracestate", ""),
    )


async def whole(
    request: Request, events: Events, outlet: Outlet, wire: Wire, *, num_choices: int
) -> Response:
    """All of it as one JSON object."""
    choices = [Choice() for _ in range(num_choices)]
    done: JobDone | None = None

    def take(delta: Delta) -> None:
        choices[delta.choice].take(delta)

    async with aclosing(events), cancelled_when_gone(request.receive):
        async for event in events:
            if isinstance(event, Delta):
                take(event)
                outlet.lead_to(take, when=lambda: True)
            elif isinstance(event, ChoiceDone):
                choices[event.choice].reason = event.reason
            else:
                done = event
    if done is None:
        raise Internal("internal error")
    return Response(wire.whole(choices, done), media_type="application/json")


async def stream(
    request: Request, events: Events, outlet: Outlet, wire: Wire, *, usage: bool, timings: bool
) -> Response:
    """A stream, once the first event is there: what fails before is a plain error."""
    try:
        async with cancelled_when_gone(request.receive):
            first = await anext(events)
    except StopAsyncIteration:
        raise Internal("internal error") from None
    return EventStream(first, events, Frames(wire, usage=usage, timings=timings), outlet)


def run_all(face: Face, jobs: Sequence[Job], outlet: Outlet) -> Events:
    """The events of one job, or of several side by side with their choices renumbered.

    Args:
        face: Runs them.
        jobs: At least one.
        outlet: For deltas of a job that is alone, see `Outlet`.
    """
    if len(jobs) == 1:
        return observed(jobs[0], face.pipeline.run(jobs[0], outlet), face.metrics, outlet)
    runs = [observed(job, face.pipeline.run(job), face.metrics) for job in jobs]
    return _merge(runs, jobs[0].sampling.n)


async def _merge(runs: Sequence[Events], per_job: int) -> Events:
    """Every run in a task of its own; the first failure ends all of them."""
    queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue(maxsize=64)
    live = {asyncio.create_task(_pump(index, run, queue)) for index, run in enumerate(runs)}
    getter = asyncio.create_task(queue.get())
    finished: list[JobDone] = []
    try:
        while len(finished) < len(runs):
            done, _ = await asyncio.wait({getter, *live}, return_when=asyncio.FIRST_COMPLETED)
            for task in done & live:
                live.discard(task)
                task.result()  # raises what the run raised
            if not getter.done():
                continue
            index, event = getter.result()
            getter = asyncio.create_task(queue.get())
            if isinstance(event, JobDone):
                finished.append(event)
            else:
                yield replace(event, choice=index * per_job + event.choice)
    finally:
        for task in (getter, *live):
            task.cancel()
        await asyncio.gather(getter, *live, return_exceptions=True)
    yield _sum(finished)


async def _pump(index: int, run: Events, queue: asyncio.Queue[tuple[int, Event]]) -> None:
    async with aclosing(run):
        async for event in run:
            await queue.put((index, event))


def _sum(done: Sequence[JobDone]) -> JobDone:
    """Usage adds up; of the timings the longest count, since the jobs ran side by side."""
    usages = [event.usage for event in done]
    return JobDone(
        Usage(
            prompt_tokens=sum(u.prompt_tokens for u in usages),
            completion_tokens=sum(u.completion_tokens for u in usages),
            cached_tokens=sum(u.cached_tokens for u in usages),
        ),
        Timings(**{f.name: max(getattr(e.timings, f.name) for e in done) for f in fields(Timings)}),
    )
