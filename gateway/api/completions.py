"""POST /v1/completions: text or token ids as they are, no chat template, no media."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from chiasm.errors import InvalidRequest
from gateway.api.answer import caller_of, face_of, run_all, stream, whole
from gateway.api.body import read_body
from gateway.api.face import Face
from gateway.api.jobs import raw_jobs
from gateway.api.openai_schema import CompletionBody
from gateway.api.openapi import takes
from gateway.api.wire import Reply, TextWire
from gateway.messages import RawJob
from gateway.outlet import Outlet

router = APIRouter()


@router.post("/v1/completions", openapi_extra=takes(CompletionBody, streams=True), tags=["OpenAI"])
async def completions(request: Request) -> Response:
    """A continuation of each prompt; `n` choices for each, numbered prompt by prompt.

    `max_tokens` is 16 unless given. Names of special tokens in a text prompt are plain text; who
    wants the tokens sends ids, which POST /tokenize makes.
    """
    face = face_of(request)
    body = await read_body(request, CompletionBody, max_bytes=face.max_body_bytes)
    caller = caller_of(request)
    jobs = raw_jobs(body, caller, vocab_size=face.vocab_size)
    _check_ids(face, jobs)
    options = body.stream_options
    if options and options.continuous_usage_stats and len(jobs) > 1:
        raise InvalidRequest(
            "usage with every chunk is for one prompt",
            param="stream_options.continuous_usage_stats",
        )
    usage = bool(body.stream_options and body.stream_options.include_usage)
    timings = bool(body.return_timings)
    wire = TextWire(
        Reply(
            id=f"cmpl-{caller.request_id}",
            model=body.model,
            bytes_of=face.prompts.vocabulary.bytes_of,
            logprobs=body.logprobs is not None,
            usage=usage,
            running=usage and bool(options and options.continuous_usage_stats),
            timings=timings,
        )
    )
    outlet = Outlet()
    events = run_all(face, jobs, outlet)
    if body.stream:
        return await stream(request, events, outlet, wire, usage=usage, timings=timings)
    return await whole(request, events, outlet, wire, num_choices=len(jobs) * jobs[0].sampling.n)


def _check_ids(face: Face, jobs: tuple[RawJob, ...]) -> None:
    for index, job in enumerate(jobs):
        if not isinstance(job.prompt, str):
            param = "prompt" if len(jobs) == 1 else f"prompt[{index}]"
            face.prompts.check_ids(job.prompt, param=param)
