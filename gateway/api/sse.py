"""Server-sent events: a pipeline's events as OpenAI chunks, and the response that carries them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from chiasm.errors import ChiasmError
from gateway.api.disconnect import cancelled_when_gone
from gateway.api.errors import error_body
from gateway.api.protocol import BoundedProtocol
from gateway.api.wire import DONE, Wire
from gateway.messages import ChoiceDone, Delta, Event, JobDone
from gateway.outlet import Outlet

EVENT_STREAM = "text/event-stream"
_HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # proxies must not collect tokens
}


def error_frames(error: ChiasmError) -> bytes:
    """An error after the status line: one event, then the terminator."""
    return b"data: " + error_body(error) + b"\n\n" + DONE


class Frames:
    """A pipeline's events as frames.

    Args:
        wire: Writes chunks.
        usage: Whether the usage chunk was asked for.
        timings: Whether the last chunk is to carry the timings.
    """

    def __init__(self, wire: Wire, *, usage: bool, timings: bool) -> None:
        self._wire = wire
        self._usage = usage
        self._waits = timings and not usage  # a finish chunk, where nothing else carries timings
        self._held: ChoiceDone | None = None
        self.last = DONE
        """What ends the stream, once all events are through."""

    def of(self, event: Event) -> bytes:
        """What is to be sent now."""
        before = b""
        if self._held is not None:
            done = event if isinstance(event, JobDone) else None
            before = self._wire.finish(self._held.choice, self._held.reason, done)
            self._held = None
        if isinstance(event, Delta):
            self._wire.count(event)
            return before + self._wire.chunk(event)
        if isinstance(event, ChoiceDone):
            if not self._waits:
                return before + self._wire.finish(event.choice, event.reason)
            self._held = event
        else:
            self.last = before + (self._wire.last(event) if self._usage else b"") + DONE
            return b""
        return before


class EventStream(Response):
    """Sends frames until the events end or the client goes.

    Args:
        first: Event.
        source: The others: the pipeline's generator, closed on every way out.
        frames: Writes them.
        outlet: Led to the connection, where that may be written to directly.
    """

    def __init__(
        self,
        first: Event,
        source: AsyncGenerator[Event, None],
        frames: Frames,
        outlet: Outlet,
    ) -> None:
        self.first = first
        self.outlet = outlet
        self.source = source
        self.frames = frames
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
            await send(_body(self.frames.of(self.first)))
            connection = scope.get("state", {}).get("connection")
            if isinstance(connection, BoundedProtocol):
                self._write_now_to(connection, scope)
            async for event in self.source:
                if frame := self.frames.of(event):
                    await send(_body(frame))
            await send(_body(self.frames.last, more=False))

    def _write_now_to(self, connection: BoundedProtocol, scope: Scope) -> None:
        """Leads deltas to the socket, past everything that has nothing to say to them."""
        frame_of, write_now = self.frames.of, connection.write_now

        def write(delta: Delta) -> None:
            if frame := frame_of(delta):
                write_now(frame)

        self.outlet.lead_to(write, when=partial(connection.takes_now, scope))


def _body(data: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
