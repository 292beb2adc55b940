"""A pipeline that follows a script, and the REST face over it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

import httpx

from chiasm.checkpoint import resolve_model
from chiasm.errors import ChiasmError, ModelNotFound
from chiasm.telemetry import GatewayMetrics
from gateway.api.budget import ByteBudget
from gateway.api.drain import Gate
from gateway.api.face import Face
from gateway.api.keys import ApiKeys
from gateway.api.metrics_page import page_of
from gateway.api.rest import build_app
from gateway.messages import (
    ChoiceDone,
    Delta,
    Event,
    FinishReason,
    Job,
    JobDone,
    Readiness,
    ServedModel,
    Timings,
    Usage,
)
from gateway.outlet import Outlet
from gateway.prompt import PromptBuilder
from gateway.tenants import Tenants

PROMPTS = PromptBuilder(resolve_model("demo"))
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USAGE = Usage(prompt_tokens=11, completion_tokens=3, cached_tokens=4)
TIMINGS = Timings(fetch=1.0, first_token=2.5)
USAGE_BODY = {
    "prompt_tokens": 11,
    "completion_tokens": 3,
    "total_tokens": 14,
    "prompt_tokens_details": {"cached_tokens": 4},
}


@dataclass
class ScriptedPipeline:
    """Yields its script for every choice; remembers jobs and how each run ended."""

    words: Sequence[str] = ("red", " circle")
    fail_first: ChiasmError | None = None
    fail_after: tuple[int, BaseException] | None = None
    make_events: Callable[[Job], Sequence[Event]] | None = None
    hold: asyncio.Event | None = None
    """When set, runs wait for it after the first event."""
    hold_first: asyncio.Event | None = None
    """When set, runs wait for it before the first event."""
    ready: Readiness = Readiness(True, True, ({"role": "decoder", "address": "d:1"},))
    jobs: list[Job] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    names: tuple[str, ...] = ("demo", "demo/alias")
    held: int = 0
    """Runs that wait for `hold` or `hold_first`."""

    async def run(self, job: Job, outlet: Outlet | None = None) -> AsyncGenerator[Event, None]:
        self.jobs.append(job)
        end = "closed"
        try:
            if job.model not in self.names:
                raise ModelNotFound(f"the model {job.model!r} is not served here", param="model")
            await self._wait(self.hold_first)
            if self.fail_first is not None:
                raise self.fail_first
            for index, event in enumerate(self._events(job)):
                if self.fail_after is not None and index == self.fail_after[0]:
                    raise self.fail_after[1]
                yield event
                await self._wait(self.hold)
            end = "finished"
        except asyncio.CancelledError:
            end = "cancelled"
            raise
        finally:
            self.ends.append(end)

    async def _wait(self, event: asyncio.Event | None) -> None:
        if event is not None:
            self.held += 1
            try:
                await event.wait()
            finally:
                self.held -= 1

    def models(self) -> list[ServedModel]:
        return [ServedModel(name, 1_700_000_000, 8192) for name in self.names]

    def readiness(self) -> Readiness:
        return self.ready

    def _events(self, job: Job) -> Sequence[Event]:
        if self.make_events is not None:
            return self.make_events(job)
        events: list[Event] = []
        for word in self.words:
            events += [Delta(c, word, (1,)) for c in range(job.sampling.n)]
        events += [ChoiceDone(c, FinishReason.STOP) for c in range(job.sampling.n)]
        return [*events, JobDone(USAGE, TIMINGS)]


def make_face(
    pipeline: ScriptedPipeline, *, keys: ApiKeys | None = None, max_body: int = 1 << 20
) -> Face:
    keys = keys or ApiKeys()
    metrics = GatewayMetrics()
    return Face(
        pipeline=pipeline,
        prompts=PROMPTS,
        keys=keys,
        tenants=Tenants(keys.limits_of),
        metrics=metrics,
        metrics_page=page_of(metrics),
        max_body_bytes=max_body,
        bodies=ByteBudget(2 << 30),
    )


def client_of(face: Face, gate: Gate | None = None) -> httpx.AsyncClient:
    """The REST face without a socket. Streams come as a whole."""
    transport = httpx.ASGITransport(build_app(face, gate or Gate()), raise_app_exceptions=True)
    return httpx.AsyncClient(transport=transport, base_url="http://gateway")


def chat(content: object = "hi", **fields: object) -> dict[str, object]:
    """A chat body."""
    return {"model": "demo", "messages": [{"role": "user", "content": content}], **fields}


def events_of(answer: httpx.Response) -> list[dict]:
    """The JSON of every event; checks the terminator."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    frames = answer.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


def check_error(answer: httpx.Response, status: int, code: str, param: str | None = None) -> str:
    assert answer.status_code == status, answer.text
    assert answer.headers["x-request-id"]
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == code
    assert body["error"]["param"] == param
    message: str = body["error"]["message"]
    assert message
    assert "Traceback" not in message
    return message
