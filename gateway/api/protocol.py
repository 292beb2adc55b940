"""uvicorn's HTTP/1.1 with bounds on what comes before and between bodies, in bytes and seconds.

uvicorn has no limit there: one connection could send a header without end, which its parser copies
anew with every packet, and any number could say nothing for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from chiasm.errors import InvalidRequest
from gateway.api.errors import error_body
from gateway.api.filling import Filling

MAX_OVERHEAD_BYTES = 64 << 10  # of a head, of trailers, of chunk sizes
_PIECE_BYTES = 256 << 10  # of a body, read at once
_MOST_FILLED = 8 << 20  # of a body that is read to its place; memory is set aside for it
_MOST_AHEAD = 64  # times what has come: a promise alone takes no memory
_PIECE_S = 0.25  # or what has come in so long


class BoundedProtocol(HttpToolsProtocol):
    """One connection. What is not HTTP gets the same envelope as every other error."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._overhead = 0  # bytes since the last end of a head, piece of a body, or message
        self._deadline: asyncio.TimerHandle | None = None
        self._told = 0.0  # when the reader of a body was last woken
        self._answered: RequestResponseCycle | None = None  # the last that was begun

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first head is awaited."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more, and whoever is being answered has gone.

        uvicorn tells only the request that came last, which may stand behind that one.
        """
        self._stop_waiting()
        answered = self._answered
        if answered is not None and not answered.response_complete:
            answered.disconnected = True
            answered.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Counts, and refuses when nothing useful has come for too many bytes."""
        self._overhead += len(data)
        super().data_received(data)
        if self._overhead > MAX_OVERHEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"headers of more than {MAX_OVERHEAD_BYTES} bytes")

    def send_400_response(self, msg: str) -> None:
        """The envelope in place of plain text; then the connection closes."""
        body = error_body(InvalidRequest(msg))
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(head.encode() + body)
        self.transport.close()

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        """A head has ended."""
        self._overhead = 0
        self._stop_waiting()
        super().on_headers_complete()

        self.scope["state"]["connection"] = self

    async def fill(
        self,
        scope: object,
        length: int,
        *,
        reserve: Callable[[int], None],
        heard: Callable[[], None],
    ) -> bytearray | None:
        """The whole body of a request, without a parser between; None: take it piece by piece.

        Args:
            scope: The request's.
            length: Of its body, as its head says.
            reserve: Counts bytes before memory is set aside for them; may raise.
            heard: Called when something has come.

        Raises:
            ConnectionError: The client has gone.
        """
        cycle = self.cycle
        come = len(cycle.body)
        ours = cycle.scope is scope and cycle.more_body and not cycle.waiting_for_100_continue
        sane = come < length <= min(_MOST_FILLED, come * _MOST_AHEAD)
        if not ours or not sane or self.transport.is_closing():
            return None
        reserve(length)
        body = bytearray(length)
        body[:come] = cycle.body
        cycle.body = bytearray()
        filling = Filling(body, come, heard=heard, over=self._filled, owner=self)
        self._lead_to(filling)
        try:
            await filling.done
        finally:
            filling.drop()
        cycle.more_body = False
        return body

    def takes_now(self, scope: object) -> bool:
        """Whether a piece of this request's answer, which has begun, would leave at once."""
        cycle = self.cycle
        return bool(
            cycle.scope is scope
            and cycle.chunked_encoding
            and not (cycle.response_complete or cycle.disconnected or self.flow.write_paused)
        )

    def write_now(self, data: bytes) -> None:
        """Writes a piece of it, as `send` would. Only after `takes_now`."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """A request's turn has come."""
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _filled(self) -> None:
        """The body has gone by: a new parser goes on, the old one would wait for it for ever."""
        self._lead_to(self)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own

    def _lead_to(self, protocol: asyncio.BaseProtocol) -> None:
        """What comes from now on is `protocol`'s; a loop asks for it when it begins to read."""
        self.flow.pause_reading()
        self.transport.set_protocol(protocol)
        self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """A piece of a body. Who reads it is not woken for each: a megabyte has dozens."""
        self._overhead = 0
        cycle = self.cycle
        if cycle.response_complete:
            return
        cycle.body += body
        now = self.loop.time()
        if len(cycle.body) >= _PIECE_BYTES or now - self._told > _PIECE_S:
            self._told = now
            cycle.message_event.set()
        if len(cycle.body) >= 2 * _PIECE_BYTES:
            self.flow.pause_reading()

    def on_message_complete(self) -> None:
        """A request has ended."""
        self._overhead = 0
        super().on_message_complete()

    def _await_head(self) -> None:
        self._stop_waiting()
        self._deadline = self.loop.call_later(self.timeout_keep_alive, self._head_is_late)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _head_is_late(self) -> None:
        """Closes, unless an earlier request of this connection is still being answered."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
