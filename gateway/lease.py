"""One run of one medium, kept encoded somewhere until every item that shows it has landed.

The open Encode stream is the lease on the encoder's rows. When it fails, or when the decoder says
that rows were lost, the run is encoded again, elsewhere if possible, and the decoder is told.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Collection
from dataclasses import dataclass
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
from chiasm.v1 import common_pb2, encoder_pb2
from gateway.clients import EncodeStream
from gateway.clients.encoder import send_media
from gateway.discovery import Fleet
from gateway.order import Item, Run, cause_error
from gateway.patience import PATIENCE_S
from gateway.routing import Charge, Endpoint
from gateway.timeline import Timeline

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3  # encodes of one run that may fail before its request does
MAX_RECALLS = 32  # times a decoder may ask again for rows it had to give up
BACK_OFF_S = 0.1  # before an encoder that failed a run is tried with it again; doubles
_MOST_PAUSES = 10
_POLL_S = 0.05
_RECALLS = (common_pb2.CAUSE_PREEMPTED, common_pb2.CAUSE_EVICTED)


@dataclass(frozen=True, slots=True)
class Scope:
    """What all leases of one request share."""

    context: common_pb2.RequestContext
    fleet: Fleet
    decoder: Endpoint
    timeline: Timeline


class Owner(Protocol):
    """Whom a lease tells."""

    def lease_settled(self) -> None:
        """The run was decoded, or is not needed."""

    def lease_failed(self, error: ChiasmError) -> None:
        """The run cannot be had; the request fails."""

    async def lease_moved(self, lease: Lease) -> None:
        """The run's rows now come from elsewhere."""


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
        self._endpoint = scope.decoder  # until assigned
        self._encode_id = secrets.token_bytes(16)
        self._charge = Charge(None, 0)
        self._tried: set[Endpoint] = set()
        self._failures = 0
        self._recalls = 0
        self._promised = False  # an encoder took the run in, or the decoder had rows of it
        self._pause_s = 0.0  # before it is asked for again
        self._moving = False
        self._stream: EncodeStream | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def source(self) -> Source:
        """Where the decoder fetches this attempt's rows."""
        return Source(self._encode_id, self._endpoint.advertised, self._endpoint.epoch)

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
            if self._stream is not None:
                await self._stream.half_close()

    async def lost(self, index: int, attempt: int, cause: common_pb2.Cause, message: str) -> None:
        """The decoder could not get the rows: encode again, or fail the request."""
        if attempt < self.attempt:
            return  # about an attempt that has been replaced already
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
            self._blame()
        if cause == common_pb2.CAUSE_EVICTED:  # at once, two requests would evict each other
            self._pause_s = BACK_OFF_S * min(self._recalls, _MOST_PAUSES)
        self._promised = True
        self.launch(error)

    async def close(self) -> None:
        """Ends the Encode: interest in the rows is gone."""
        await self._cancel()
        self._charge.release()

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
                    self._blame()
        except ChiasmError as error:
            if self.waiting:
                if isinstance(error, InvalidRequest):
                    error.param = error.param or self._item.param
                self._owner.lease_failed(error)

    def _blame(self) -> None:
        self._failures += 1
        self._tried.add(self._endpoint)

    async def _encode(self) -> None:
        """One attempt. Returns once its rows are needed no more; raises when they cannot be had."""
        client = self._scope.fleet.encoder(self._endpoint.address)
        self._stream = stream = client.encode(timeout_s=self._scope.timeline.remaining_s())
        start = encoder_pb2.EncodeStart(
            context=self._scope.context,
            encode_id=self._encode_id,
            plan=self._item.plan.to_proto(),
            frames=self.run.frames.to_proto() if self.run.frames else None,
            rows=self.run.rows.to_proto() if self.run.frames else None,
            encoder_epoch=self._endpoint.epoch,
            repair=self._promised,
        )
        try:
            await stream.send(encoder_pb2.EncodeRequest(start=start))
            await self._read(stream)
        finally:
            self._stream = None
            self._charge.release()
            await stream.close()

    async def _read(self, stream: EncodeStream) -> None:
        rows_ready = 0
        async for message in stream:
            kind = message.WhichOneof("kind")
            if kind == "accepted":
                self._promised = True
                if message.accepted.media_needed:
                    await send_media(stream, self._item.data)
            elif kind == "ready":
                rows_ready += message.ready.rows.end - message.ready.rows.begin
                if rows_ready >= len(self.run.rows):
                    self._settle()
            elif kind == "done":
                self._charge.release()
                self._router.succeeded(self._endpoint)
                self._settle()
            elif kind == "error":
                error = message.error
                raise cause_error(error.cause, error.message, param=self._item.param)
        if self.waiting:
            raise Unavailable("the encoder ended the stream before its rows had landed")

    async def _move(self, error: ChiasmError) -> None:
        """Chooses where to encode next and tells the decoder. Raises `error` when nowhere."""
        if self._failures >= MAX_ATTEMPTS or self._recalls > MAX_RECALLS:
            raise error
        if isinstance(error, Unavailable) and not isinstance(error, EmbeddingLost):
            self._router.failed(self._endpoint)
        logger.info(
            "%s: item %d is encoded again: %s",
            self._scope.context.request_id,
            self._item.index,
            error.message,
        )
        self._moving = True
        try:
            pause_s, self._pause_s = self._pause_s, 0.0
            await asyncio.sleep(pause_s)
            await self._choose(error)
        finally:
            self._moving = False
        self._encode_id = secrets.token_bytes(16)
        self.attempt += 1
        await self._owner.lease_moved(self)

    async def _choose(self, error: ChiasmError) -> None:
        """Takes an encoder not tried yet; after a back-off any will do. Raises `error`."""
        back_off_s = BACK_OFF_S * 2**self._failures if self._failures else 0.0
        waited_s = 0.0
        while True:
            if self._take(self._tried):
                return
            if isinstance(error, ResourceExhausted):
                raise error  # all are full: waiting here would only hide it
            if waited_s >= back_off_s and self._take(()):
                return
            if waited_s >= min(PATIENCE_S, self._scope.timeline.remaining_s()):
                raise error
            await asyncio.sleep(_POLL_S)
            waited_s += _POLL_S

    def _take(self, exclude: Collection[Endpoint]) -> bool:
        key, patches = self.run.key, self.run.patches
        found = self._router.pick(
            key, patches, fits=self._scope.decoder, tower=self._item.tower, exclude=exclude
        )
        if found is None:
            return False
        self._charge.release()
        self._charge = self._router.book(found, key, patches)
        self._endpoint = found
        return True

    def _settle(self) -> None:
        if not self.settled:
            self.settled = True
            self._owner.lease_settled()
