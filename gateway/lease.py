"""One run of one medium, kept encoded somewhere until every item that shows it has landed.

When an Encode fails, or the decoder says that rows were lost, the run is encoded again, elsewhere
if possible, and the decoder is told. One that is slow may be hedged: a second encoder is asked too,
the decoder takes the rows from whichever is ready first, and the other is let go.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Protocol

from chiasm.errors import (
    ChiasmError,
    EmbeddingLost,
    Internal,
    InvalidRequest,
    ResourceExhausted,
    Unavailable,
)
from chiasm.plan import Source
from chiasm.v1 import common_pb2
from gateway.encode_call import EncodeCall, Scope
from gateway.order import Item, Run, cause_error
from gateway.patience import PATIENCE_S
from gateway.routing import Endpoint

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3  # encodes of one run that may fail before its request does
MAX_RECALLS = 32  # times a decoder may ask again for rows it had to give up
BACK_OFF_S = 0.1  # before an encoder that failed a run is tried with it again; doubles
_MOST_PAUSES = 10
_POLL_S = 0.05
_RECALLS = (common_pb2.CAUSE_PREEMPTED, common_pb2.CAUSE_EVICTED)


class Owner(Protocol):
    """Whom a lease tells."""

    def lease_settled(self) -> None:
        """The run was decoded, or is not needed."""

    def lease_failed(self, error: ChiasmError) -> None:
        """The run cannot be had; the request fails."""

    async def lease_moved(self, lease: Lease) -> None:
        """The run's rows now come from `lease.source`."""

    async def lease_hedged(self, lease: Lease) -> None:
        """The run's rows may also come from `lease.source`."""

    async def lease_refused(self, lease: Lease) -> bool:
        """No encoder has room. Returns, after a while, whether this request may make some."""


class Lease:
    """Call `assign`, then `launch`, and `close` at the end.

    Args:
        run: What to encode.
        items: That show it; the first one's bytes are sent.
        scope: The request's.
        owner: Whom to tell.
    """

    def __init__(self, run: Run, items: tuple[Item, ...], scope: Scope, owner: Owner) -> None:
        self.run = run
        self.attempt = 1
        self.settled = False
        self.waiting = {item.index for item in items}
        """Items whose rows have not landed."""
        self._item = items[0]
        self._scope = scope
        self._owner = owner
        self._router = scope.fleet.encoders
        self._calls: list[EncodeCall] = []  # of this attempt: one, or two when hedged
        self._running: dict[asyncio.Task[None], EncodeCall] = {}
        self._tried: set[Endpoint] = set()
        self._failures = 0
        self._recalls = 0
        self._promised = False  # an encoder took the run in, or the decoder had rows of it
        self._pause_s = 0.0  # before it is asked for again
        self._moving = False
        self._task: asyncio.Task[None] | None = None

    @property
    def holds_rows(self) -> bool:
        """Whether an encoder keeps, or makes, rows that have not landed."""
        return self._promised and bool(self.waiting)

    @property
    def source(self) -> Source:
        """Where the decoder fetches this attempt's rows."""
        return self._calls[-1].source

    async def assign(self) -> None:
        """Chooses an encoder; nothing is called yet. Raises Unavailable."""
        await self._choose(Unavailable("no encoder is available", retry_after_s=PATIENCE_S))

    def launch(self, lost: ChiasmError | None = None) -> None:
        """Opens the Encode; where rows were lost, after having moved."""
        self._task = asyncio.create_task(self._drive(lost))
        self._task.add_done_callback(self._ended)

    async def landed(self, index: int) -> None:
        """An item needs its rows from nobody any more; with the last one the lease ends."""
        self.waiting.discard(index)
        if not self.waiting:
            self._settle()
            for call in self._calls:
                await call.let_go()

    async def lost(self, index: int, attempt: int, cause: common_pb2.Cause, message: str) -> None:
        """The decoder could not get the rows: encode again, or fail the request."""
        if attempt < self.attempt:
            return  # about an attempt that has been replaced already, or joined by a hedge
        error = cause_error(cause, message, param=self._item.param)
        if not error.retryable:
            self._owner.lease_failed(error)
            return
        self.waiting.add(index)
        if self._moving:
            return  # the Encode's own end has told us already
        await self._cancel()
        if cause in _RECALLS:  # the decoder's own doing: its encoder is as good as any
            self._recalls += 1
        else:
            self._failures += 1
            self._tried.update(call.endpoint for call in self._calls)
        if cause == common_pb2.CAUSE_EVICTED:  # at once, two requests would evict each other
            self._pause_s = BACK_OFF_S * min(self._recalls, _MOST_PAUSES)
        self._promised = True
        self.launch(error)

    async def close(self) -> None:
        """Ends the Encode: interest in the rows is gone."""
        await self._cancel()
        for call in self._calls:
            call.release()
        self._calls.clear()  # no cycles: the medium goes with its request
        self._task = None

    def call_accepted(self) -> None:
        """From a call: the rows are promised now."""
        self._promised = True

    def call_ready(self, call: EncodeCall) -> None:
        """From a call: of two, the one that is ready first is kept.

        The decoder may have seen the other first and be fetching from it. No harm: its Fetch is
        interest enough.
        """
        if len(self._calls) > 1:
            self._scope.metrics.hedges.labels("won").inc(call is self._calls[-1])
            for task, other in self._running.items():
                if other is not call:
                    task.cancel()

    def call_whole(self) -> None:
        """From a call: the medium can be decoded."""
        self._settle()

    async def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            request_id = self._scope.context.request_id
            logger.error("%s failed", request_id, exc_info=task.exception())
            self._owner.lease_failed(Internal("internal error"))

    async def _drive(self, lost: ChiasmError | None) -> None:
        """Encodes, and moves, until no item waits."""
        try:
            while self.waiting:
                if lost is not None:
                    await self._move(lost)
                try:
                    return await self._encode()
                except ChiasmError as error:
                    if not error.retryable or not self.waiting:
                        raise
                    lost = error
                    full = isinstance(error, ResourceExhausted)
                    if full and await self._owner.lease_refused(self):
                        self._tried.clear()
                    else:
                        self._failures += 1
        except ChiasmError as error:
            if self.waiting:
                if isinstance(error, InvalidRequest):
                    error.param = error.param or self._item.param
                self._owner.lease_failed(error)

    async def _encode(self) -> None:
        """One attempt: returns once its rows are needed no more; raises when no call has them."""
        self._start(self._calls[-1], repair=self._promised)
        hedge_s = self._scope.hedge_after_s or None
        try:
            while True:
                done, _ = await asyncio.wait(
                    self._running, timeout=hedge_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    hedge_s = None
                    await self._hedge()
                for task in done:
                    if self._took_rows(task):
                        return
        finally:
            running, self._running = tuple(self._running), {}
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _start(self, call: EncodeCall, *, repair: bool) -> None:
        self._running[asyncio.create_task(call.run(repair=repair))] = call

    def _took_rows(self, task: asyncio.Task[None]) -> bool:
        """Whether a call that has ended was let go. Raises its error if nobody else is asked."""
        call = self._running.pop(task)
        if task.cancelled():  # the other one was ready first
            return False
        error = task.exception()
        if error is None:
            return True
        if isinstance(error, ChiasmError) and error.retryable:
            self._tried.add(call.endpoint)
            self._report(call.endpoint, error)
            if self._running:
                return False
        raise error

    def _report(self, endpoint: Endpoint, error: ChiasmError) -> None:
        """Tells the router of an encoder that is not there, or that makes no rows."""
        if isinstance(error, EmbeddingLost):
            self._router.doubted(endpoint)
        elif isinstance(error, Unavailable):
            self._router.failed(endpoint)

    async def _hedge(self) -> None:
        """Asks a second encoder, if there is one and the first has nothing ready yet."""
        (first,) = self._calls
        found = None if first.ready else self._pick(self._tried | {first.endpoint})
        if found is None or not self.waiting:
            return
        call = self._take(found)
        self.attempt += 1
        self._scope.metrics.hedges.labels("sent").inc()
        self._start(call, repair=False)
        await self._owner.lease_hedged(self)

    async def _move(self, error: ChiasmError) -> None:
        """Chooses where to encode next and tells the decoder. Raises `error` when nowhere."""
        if self._failures >= MAX_ATTEMPTS or self._recalls > MAX_RECALLS:
            raise error
        request_id = self._scope.context.request_id
        logger.info("%s: item %d is encoded again: %s", request_id, self._item.index, error.message)
        self._moving = True
        try:
            pause_s, self._pause_s = self._pause_s, 0.0
            await asyncio.sleep(pause_s)
            await self._choose(error)
        finally:
            self._moving = False
        self.attempt += 1
        self._scope.metrics.encode_moves.labels(error.code).inc()
        await self._owner.lease_moved(self)

    async def _choose(self, error: ChiasmError) -> None:
        """Takes an encoder not tried yet; after a back-off any will do. Raises `error`."""
        back_off_s = BACK_OFF_S * 2**self._failures if self._failures else 0.0
        waited_s = 0.0
        while True:
            found = self._pick(self._tried)
            if found is None and isinstance(error, ResourceExhausted):
                raise error  # all are full: waiting here would only hide it
            if found is None and waited_s >= back_off_s:
                found = self._pick(())
            if found is not None:
                for call in self._calls:
                    call.release()
                self._calls.clear()
                self._take(found)
                return
            if waited_s >= min(PATIENCE_S, self._scope.timeline.remaining_s()):
                raise error
            await asyncio.sleep(_POLL_S)
            waited_s += _POLL_S

    def _pick(self, exclude: Collection[Endpoint]) -> Endpoint | None:
        return self._router.pick(
            self.run.key,
            self.run.patches,
            fits=self._scope.decoder,
            tower=self._item.tower,
            exclude=exclude,
        )

    def _take(self, endpoint: Endpoint) -> EncodeCall:
        call = EncodeCall(self.run, self._item, endpoint, self._scope, self)
        self._calls.append(call)
        return call

    def _settle(self) -> None:
        if not self.settled:
            self.settled = True
            self._owner.lease_settled()
