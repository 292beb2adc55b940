"""The asyncio side of the engine: one stream of events per request. Lives on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from chiasm.errors import ResourceExhausted, Unavailable
from chiasm.telemetry import DecoderMetrics
from decoder_svc.admission import BOUNDLESS, RETRY_AFTER_S, Admission, Place, Room
from decoder_svc.embeddings.events import FetchCommand
from decoder_svc.engine.mailbox import Mailbox
from decoder_svc.engine.messages import (
    AbortRequest,
    AddRequest,
    Command,
    EngineLoad,
    Event,
    RequestDone,
    RequestFailed,
    StepEvents,
    Tokens,
)


class EventStream:
    """What the engine says about one request. Closing it early aborts the request."""

    def __init__(self, request_id: str, client: EngineClient, place: Place) -> None:
        self.request_id = request_id
        self._place = place
        self._client = client
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._over = False
        self._has_begun = False
        self._is_idle = False
        """Whether somebody waits in `next`, and nothing has come yet."""
        self.shortcut: Callable[[int, int, int], bool] | None = None
        """Passes a token on, by choice and position, past a caller that waits in `next` for it and
        would do the same; False when that cannot be done now."""

    async def next(self) -> list[Event]:
        """Events since the last call, at least one; a choice's neighbouring tokens are joined."""
        self._is_idle = self._events.empty()
        events = [await self._events.get()]
        while not self._events.empty():
            events.append(self._events.get_nowait())
        return merge(events)

    def put(self, event: Event) -> None:
        """The engine said something."""
        self._place.heard(event)
        self._has_begun = self._has_begun or isinstance(event, Tokens)
        self._over = self._over or isinstance(event, RequestDone | RequestFailed)
        self._is_idle = False
        self._events.put_nowait(event)

    def put_token(self, choice: int, position: int, token_id: int) -> None:
        """The engine said one token, and nothing about it."""
        shortcut = self.shortcut if self._is_idle and self._has_begun else None
        if shortcut is None or not shortcut(choice, position, token_id):
            self.put(Tokens(choice, position, (token_id,)))

    def close(self) -> None:
        """Nobody listens any more. Idempotent."""
        self._place.leave()
        self._client.forget(self.request_id, abort=not self._over)
        self._over = True


class EngineClient:
    """Hands requests to the engine and its events to whoever asked.

    Args:
        max_waiting: Requests that may wait before new ones are refused.
        room: For what they need.
        metrics: Gauges of the engine's load.
    """

    def __init__(
        self,
        *,
        max_waiting: int,
        room: Room = BOUNDLESS,
        metrics: DecoderMetrics,
    ) -> None:
        self.load = EngineLoad()
        self.draining = False
        self.mailbox = Mailbox(self._from_engine)
        self.admission = Admission(room)
        self._max_waiting = max(1, max_waiting)
        self.on_commands: Callable[[Sequence[FetchCommand]], None] = _no_transfers
        """Runs transfer commands; set once, before the engine starts."""
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, EventStream] = {}
        self._num_submitted = 0

    @property
    def num_open(self) -> int:
        """Requests whose callers listen."""
        return len(self._streams)

    @property
    def num_waiting(self) -> int:
        """Requests that are not in the batch, those in the mailbox included."""
        load = self.load
        return load.waiting + self._num_submitted - load.requests_seen

    def open(self, add: AddRequest) -> EventStream:
        """Submits a request.

        Raises:
            Unavailable: This decoder is shutting down, or has no ranks at the moment.
            ResourceExhausted: Too much waits already; nothing was started.
        """
        if self.draining:
            raise Unavailable("the decoder is shutting down", retry_after_s=RETRY_AFTER_S)
        if not self.load.available:
            raise Unavailable("the decoder's ranks are starting", retry_after_s=RETRY_AFTER_S)
        if self.num_waiting >= self._max_waiting:
            raise ResourceExhausted(
                f"{self.num_waiting} requests are waiting already", retry_after_s=RETRY_AFTER_S
            )
        place = self.admission.enter(add)
        self._num_submitted += 1
        # A replay may come before its first life has ended, or before the engine's last words of
        # that have been heard: each life has a name of its own.
        add = replace(add, request_id=f"{add.request_id}#{self._num_submitted}")
        stream = EventStream(add.request_id, self, place)
        self._streams[add.request_id] = stream
        self.mailbox.put(add)
        return stream

    def tell(self, command: Command) -> None:
        """Passes a command on."""
        self.mailbox.put(command)

    def forget(self, request_id: str, *, abort: bool) -> None:
        """Drops a stream, and with `abort` its request."""
        if self._streams.pop(request_id, None) is not None and abort:
            self.mailbox.put(AbortRequest(request_id))

    def _from_engine(
        self,
        events: StepEvents,
        commands: Sequence[FetchCommand],
        load: EngineLoad,
    ) -> None:
        self.load = load
        self._metrics.running.set(load.running)
        self._metrics.waiting.set(load.waiting)
        self._metrics.waiting_tokens.set(load.waiting_tokens)
        self._metrics.kv_usage.set(load.kv_usage_ratio)
        if events or commands:
            self._loop.call_soon_threadsafe(self._deliver, events, commands)

    def _deliver(self, events: StepEvents, commands: Sequence[FetchCommand]) -> None:
        if commands:
            self.on_commands(commands)
        for tokens in events.tokens:
            for request_id, choice, position, token_id in tokens.rows():
                stream = self._streams.get(request_id)
                if stream is not None:
                    stream.put_token(choice, position, token_id)
        for request_id, event in events.others:
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.put(event)


def merge(events: Sequence[Event]) -> list[Event]:
    """Joins tokens of a choice that follow one another: a slow reader gets fewer messages."""
    merged: list[Event] = []
    for event in events:
        last = merged[-1] if merged else None
        if (
            isinstance(event, Tokens)
            and isinstance(last, Tokens)
            and event.choice == last.choice
            and event.position == last.position + len(last.token_ids)
        ):
            ids, sampled = last.token_ids + event.token_ids, last.sampled + event.sampled
            merged[-1] = Tokens(last.choice, last.position, ids, sampled)
        else:
            merged.append(event)
    return merged


def _no_transfers(commands: Sequence[FetchCommand]) -> None:
    raise AssertionError(f"nobody runs transfer commands: {commands}")
