"""Server-sent events: a pipeline's events as OpenAI chunks, and the response that carries them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from chiasm.errors import ChiasmError
from gateway.api.disconnect import cancelled_when_gone
from gateway.api.errors import error_body
from gateway.api.wire import DONE, Wire
from gateway.messages import ChoiceDone, Delta, Event, JobDone

EVENT_STREAM = "text/event-stream"
_HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # proxies must not collect tokens
}


def error_frames(error: ChiasmError) -> bytes:
    """An error after the status line: one event, then the terminator."""
    return b"data: " + error_body(error) + b"\n\n" + DONE


async def chunks(
    first: Event, events: AsyncIterator[Event], wire: Wire, *, usage: bool, timings: bool
) -> AsyncIterator[bytes]:
    """Events as frames. A finish chunk waits for the timings where nothing else carries them."""
    held: ChoiceDone | None = None
    event: Event | None = first
    while event is not None:
        if held is not None and not isinstance(event, JobDone):
            yield wire.finish(held.choice, held.reason)
            held = None
        if isinstance(event, Delta):
            wire.count(event)
            if frame := wire.chunk(event):
                yield frame
        elif isinstance(event, ChoiceDone):
            if timings and not usage:
                held = event
            else:
                yield wire.finish(event.choice, event.reason)
        else:
            if held is not None:
                yield wire.finish(held.choice, held.reason, event)
            if usage:
                yield wire.last(event)
        event = await anext(events, None)
    yield DONE


class EventStream(Response):
    """Sends frames until they end or the client goes; then closes what makes them.

    Args:
        frames: What to send.
        source: The pipeline's generator, closed on every way out.
    """

    def __init__(self, frames: AsyncIterator[bytes], source: AsyncGenerator[Event, None]) -> None:
        self.frames = frames
        self.source = source
        self.status_code = 200
        self.media_type = EVENT_STREAM
        self.background = None
        self.init_headers(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs in the request's own task, as the pipeline's generator must."""
        async with aclosing(self.source), cancelled_when_gone(receive):
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            async for frame in self.frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
