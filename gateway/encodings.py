"""The Encode calls of one request: opened, held until their rows landed, moved when they fail.

One entry per digest, however many items show it. The open stream is the lease on the rows.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from chiasm.errors import (
    ChiasmError,
    EmbeddingLost,
    Internal,
    InvalidRequest,
    ResourceExhausted,
    Unavailable,
)
from chiasm.plan import Part, Promise, Source, Span
from chiasm.v1 import common_pb2, decoder_pb2, encoder_pb2
from gateway.clients import EncodeStream
from gateway.clients.encoder import send_media
from gateway.discovery import Fleet
from gateway.order import Item, Order, cause_error
from gateway.routing import Charge, Endpoint
from gateway.timeline import Timeline

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3  # encodes of one item that may fail before its request does
MAX_RECALLS = 32  # times a decoder may ask again for rows it had to give up
PATIENCE_S = 3.0  # how long a request waits for an encoder to come (back)
BACK_OFF_S = 0.1  # before an encoder that failed an item is tried with it again; doubles
_POLL_S = 0.05
_RECALLS = (common_pb2.CAUSE_PREEMPTED, common_pb2.CAUSE_EVICTED)


class Listener(Protocol):
    """Whom Encodings tells."""

    def encodings_settled(self) -> None:
        """Every item has been decoded: none can turn out to be the client's fault any more."""

    def encoding_failed(self, error: ChiasmError) -> None:
        """An item cannot be had; the request fails."""

    async def encoding_moved(self, redirect: decoder_pb2.Redirect) -> None:
        """A part's rows now come from elsewhere."""


@dataclass(slots=True)
class _Entry:
    """One digest. Written by `_drive` and, on the decoder's word, by `landed` and `lost`."""

    items: tuple[Item, ...]
    endpoint: Endpoint
    encode_id: bytes = b""
    attempt: int = 1
    failures: int = 0
    recalls: int = 0
    waiting: set[int] = field(default_factory=set)  # items whose rows have not landed
    tried: set[Endpoint] = field(default_factory=set)
    stream: EncodeStream | None = None
    task: asyncio.Task[None] | None = None
    rows_ready: int = 0
    settled: bool = False

    @property
    def source(self) -> Source:
        """Where the decoder fetches this attempt's rows."""
        return Source(self.encode_id, self.endpoint.advertised, self.endpoint.epoch)


class Encodings:
    """Owns the Encode streams of one request.

    Args:
        order: The planned request.
        fleet: Encoders to choose from.
        decoder: Whose rows they are to be.
        timeline: The request's deadline.
        listener: Whom to tell.
    """

    def __init__(
        self,
        order: Order,
        *,
        fleet: Fleet,
        decoder: Endpoint,
        timeline: Timeline,
        listener: Listener,
    ) -> None:
        self._items = order.items
        self._context = order.context
        self._fleet = fleet
        self._decoder = decoder
        self._timeline = timeline
        self._listener = listener
        self._by_digest: dict[bytes, _Entry] = {}
        self._began = 0.0

    @property
    def settled(self) -> bool:
        """Every item was decoded, or is not needed."""
        return all(entry.settled for entry in self._by_digest.values())

    async def assign(self) -> list[Promise]:
        """Chooses an encoder per digest; nothing is called yet. Raises Unavailable."""
        for item in self._items:
            digest = item.plan.digest
            if digest in self._by_digest:
                continue
            shown = tuple(other for other in self._items if other.plan.digest == digest)
            entry = _Entry(shown, self._decoder, secrets.token_bytes(16))
            entry.endpoint = await self._pick(entry, Unavailable("no encoder is available"))
            entry.waiting.update(other.index for other in shown)
            self._by_digest[digest] = entry
        return [self._promise(item) for item in self._items]

    def launch(self) -> None:
        """Opens every Encode."""
        self._began = self._timeline.now()
        for entry in self._by_digest.values():
            self._spawn(entry)

    async def landed(self, index: int) -> None:
        """The decoder needs an item's rows from nobody any more: the lease may end."""
        entry = self._by_digest[self._items[index].plan.digest]
        entry.waiting.discard(index)
        if not entry.waiting:
            self._settle(entry)
            if entry.stream is not None:
                await entry.stream.half_close()

    async def lost(self, lost: decoder_pb2.EmbeddingLost) -> None:
        """The decoder could not get an item's rows: encode again, or fail the request."""
        item = self._items[lost.item]
        entry = self._by_digest[item.plan.digest]
        if lost.attempt < entry.attempt:
            return  # about an attempt that has been replaced already
        error = cause_error(lost.cause, lost.message, param=item.param)
        if not error.retryable:
            self._listener.encoding_failed(error)
            return
        entry.waiting.add(lost.item)
        await _cancel(entry.task)
        recall = lost.cause in _RECALLS
        self._spawn(entry, lost=error, recall=recall)

    async def close(self) -> None:
        """Ends every Encode: interest in the rows is gone."""
        entries = self._by_digest.values()
        await asyncio.gather(*(_cancel(entry.task) for entry in entries))

    def _promise(self, item: Item) -> Promise:
        entry = self._by_digest[item.plan.digest]
        part = Part(0, Span(0, item.plan.num_rows), entry.source, attempt=entry.attempt)
        return Promise(item.index, item.plan, item.prompt_offset, (part,))

    def _spawn(
        self, entry: _Entry, *, lost: ChiasmError | None = None, recall: bool = False
    ) -> None:
        entry.task = asyncio.create_task(self._drive(entry, lost=lost, recall=recall))
        entry.task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            logger.error("%s failed", self._context.request_id, exc_info=task.exception())
            self._listener.encoding_failed(Internal("internal error"))

    async def _drive(
        self, entry: _Entry, *, lost: ChiasmError | None = None, recall: bool = False
    ) -> None:
        """Keeps one digest encoded until all its items have landed."""
        try:
            while entry.waiting:
                if lost is not None:
                    await self._move(entry, lost, recall=recall)
                    if not entry.waiting:
                        return
                try:
                    return await self._encode(entry)
                except ChiasmError as error:
                    if not error.retryable:
                        raise
                    lost, recall = error, False
        except ChiasmError as error:
            if entry.waiting:
                if isinstance(error, InvalidRequest):
                    error.param = error.param or entry.items[0].param
                self._listener.encoding_failed(error)

    async def _encode(self, entry: _Entry) -> None:
        """One attempt. Returns once its rows are needed no more; raises when they cannot be had."""
        plan, endpoint = entry.items[0].plan, entry.endpoint
        client = self._fleet.encoder(endpoint.address)
        charge = self._fleet.encoders.book(endpoint, plan.digest, plan.patches)
        stream = client.encode(timeout_s=self._timeline.remaining_s())
        entry.stream = stream
        start = encoder_pb2.EncodeStart(
            context=self._context,
            encode_id=entry.encode_id,
            plan=plan.to_proto(),
            encoder_epoch=endpoint.epoch,
        )
        try:
            await stream.send(encoder_pb2.EncodeRequest(start=start))
            await self._read(entry, stream, charge)
        finally:
            entry.stream = None
            charge.release()
            await stream.close()

    async def _read(self, entry: _Entry, stream: EncodeStream, charge: Charge) -> None:
        item = entry.items[0]
        async for message in stream:
            kind = message.WhichOneof("kind")
            if kind == "accepted" and message.accepted.media_needed:
                await send_media(stream, item.data)
            elif kind == "ready":
                entry.rows_ready += message.ready.rows.end - message.ready.rows.begin
                if entry.rows_ready >= item.plan.num_rows:
                    self._settle(entry)
            elif kind == "done":
                charge.release()
                self._fleet.encoders.succeeded(entry.endpoint)
                self._settle(entry)
            elif kind == "error":
                raise cause_error(message.error.cause, message.error.message, param=item.param)
        if entry.waiting:
            raise Unavailable("the encoder ended the stream before its rows had landed")

    async def _move(self, entry: _Entry, error: ChiasmError, *, recall: bool) -> None:
        """Chooses where to encode next and tells the decoder. Raises `error` when nowhere."""
        entry.recalls += recall
        entry.failures += not recall
        if entry.failures >= MAX_ATTEMPTS or entry.recalls > MAX_RECALLS:
            raise error
        if not recall:
            entry.tried.add(entry.endpoint)
        if isinstance(error, Unavailable) and not isinstance(error, EmbeddingLost):
            self._fleet.encoders.failed(entry.endpoint)
        logger.info(
            "%s: item %d is encoded again: %s",
            self._context.request_id,
            entry.items[0].index,
            error.message,
        )
        entry.endpoint = await self._pick(entry, error)
        entry.encode_id = secrets.token_bytes(16)
        entry.attempt += 1
        entry.rows_ready = 0
        for index in sorted(entry.waiting):
            await self._listener.encoding_moved(
                decoder_pb2.Redirect(
                    item=index, part=0, attempt=entry.attempt, source=entry.source.to_proto()
                )
            )

    async def _pick(self, entry: _Entry, error: ChiasmError) -> Endpoint:
        """An encoder that has not been tried; after a back-off any will do. Raises `error`."""
        back_off_s = BACK_OFF_S * 2**entry.failures if entry.failures else 0.0
        waited_s = 0.0
        while True:
            if (found := self._choose(entry.items[0], entry.tried)) is not None:
                return found
            if isinstance(error, ResourceExhausted):
                raise error  # all are full: waiting here would only hide it
            if waited_s >= back_off_s and (found := self._choose(entry.items[0], ())):
                return found
            if waited_s >= min(PATIENCE_S, self._timeline.remaining_s()):
                raise error
            await asyncio.sleep(_POLL_S)
            waited_s += _POLL_S

    def _choose(self, item: Item, exclude: Collection[Endpoint]) -> Endpoint | None:
        plan = item.plan
        return self._fleet.encoders.pick(
            plan.digest, plan.patches, fits=self._decoder, tower=item.tower, exclude=exclude
        )

    def _settle(self, entry: _Entry) -> None:
        if not entry.settled:
            entry.settled = True
            if self.settled:
                self._timeline.add("encode", self._timeline.since_ms(self._began))
                self._listener.encodings_settled()


async def _cancel(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
