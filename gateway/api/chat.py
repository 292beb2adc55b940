"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.api.answer import caller_of, face_of, run_all, stream, whole
from gateway.api.body import read_chat
from gateway.api.jobs import chat_job
from gateway.api.openai_schema import ChatBody
from gateway.api.openapi import takes
from gateway.api.wire import ChatWire, Reply
from gateway.outlet import Outlet

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=takes(ChatBody, streams=True), tags=["OpenAI"])
async def chat_completions(request: Request) -> Response:
    """An answer to a conversation with pictures and clips, whole or as a stream of events.

    `max_tokens` (or `max_completion_tokens`) beyond the context is cut to what is left of it, and
    that is also the default. Text ends before the leftmost stop string; a character the model did
    not finish is dropped. An error after the first event is the stream's last event. Unknown fields
    are ignored; known ones that are not supported are refused by name. With `return_timings` the
    answer (in a stream its last chunk) says where the time went, in milliseconds.
    """
    face = face_of(request)
    body, lifted = await read_chat(request, max_bytes=face.max_body_bytes)
    job = chat_job(body, caller_of(request), vocab_size=face.vocab_size, lifted=lifted)
    options = body.stream_options
    usage = bool(options and options.include_usage)
    timings = bool(body.return_timings)
    wire = ChatWire(
        Reply(
            id=f"chatcmpl-{job.request_id}",
            model=body.model,
            bytes_of=face.prompts.vocabulary.bytes_of,
            logprobs=bool(body.logprobs),
            usage=usage,
            running=usage and bool(options and options.continuous_usage_stats),
            timings=timings,
        )
    )
    outlet = Outlet()
    events = run_all(face, (job,), outlet)
    if body.stream:
        return await stream(request, events, outlet, wire, usage=usage, timings=timings)
    return await whole(request, events, outlet, wire, num_choices=job.sampling.n)
