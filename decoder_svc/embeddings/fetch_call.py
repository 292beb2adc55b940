"""One Fetch stream, from its opening to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import grpc

from chiasm.channel import being_cancelled, messages
from chiasm.plan import Cause, Span
from chiasm.rows import RowFormat
from chiasm.transport.base import STREAM, Receiver
from chiasm.v1 import encoder_pb2, encoder_pb2_grpc
from decoder_svc.embeddings.events import (
    Accepted,
    Cancel,
    Failed,
    FetchEvent,
    Grant,
    Landed,
    Open,
    Ready,
)

Call = grpc.aio.StreamStreamCall[encoder_pb2.FetchRequest, encoder_pb2.FetchResponse]


class FetchCall:
    """Sends the grants of one fetch and lands its rows.

    Args:
        opening: What to fetch.
        receiver: The transport's landing half.
        row_format: What the decoder is built for.
        post: Gets events.
    """

    def __init__(
        self,
        opening: Open,
        receiver: Receiver,
        row_format: RowFormat,
        post: Callable[[FetchEvent], None],
    ) -> None:
        self.fetch_id = opening.fetch_id
        self.request_id = opening.request_id
        self.over = asyncio.Event()  # set by the owner
        self._opening = opening
        self._receiver = receiver
        self._row_format = row_format
        self._post = post
        self._orders: asyncio.Queue[Grant | Cancel] = asyncio.Queue()
        # Grants as the encoder counts them; one that is given back comes once more, on the stream.
        self._sent: dict[int, Grant] = {}
        self._arrived: set[int] = set()  # of which the encoder has still to say Written
        self._num_sent = 0
        self._num_missing = len(opening.rows)
        self._is_denied = False  # the encoder takes rows for unwritten that have arrived
        self._call: Call | None = None
        self._failed = False
        receiver.on_arrived = self._landed

    @property
    def receiver(self) -> Receiver:
        """The transport's landing half."""
        return self._receiver

    @property
    def num_dropped_chunks(self) -> int:
        """Chunks that no grant asked for."""
        return self._receiver.num_dropped

    def send(self, order: Grant | Cancel) -> None:
        """Queues a message to the encoder."""
        self._orders.put_nowait(order)

    def break_off(self) -> None:
        """Ends the stream without waiting for the encoder."""
        if self._call is not None:
            self._call.cancel()

    async def run(self, stub: encoder_pb2_grpc.EncoderStub) -> bool:
        """Runs to the end of the stream; returns whether the encoder said Quiesced.

        Raises:
            ChiasmError: The stream broke.
        """
        call = self._call = stub.Fetch()
        writer = asyncio.create_task(self._write(call))
        try:
            async for response in messages(call):
                if response.HasField("quiesced"):
                    await self._receiver.quiet(aborted=response.quiesced.aborted)
                    return True
                await self._handle(response)
            return False
        except asyncio.CancelledError:
            if call.cancelled() and not being_cancelled():
                return False  # broken off
            raise
        finally:
            writer.cancel()
            with suppress(asyncio.CancelledError):
                await writer
            call.cancel()

    async def _write(self, call: Call) -> None:
        # When the stream breaks under a write, the reader hears of it as well, and says so.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(encoder_pb2.FetchRequest(open=self._open_message()))
            while True:
                order = await self._orders.get()
                if isinstance(order, Cancel):
                    cancel = encoder_pb2.FetchCancel()
                    await call.write(encoder_pb2.FetchRequest(cancel=cancel))
                    continue
                self._num_sent += 1
                seq, self._sent[self._num_sent] = self._num_sent, order
                places = self._receiver.expect(order.segment, seq, order.destinations)
                grant = encoder_pb2.FetchGrant(
                    segment=order.segment, destinations=[place.to_proto() for place in places]
                )
                await call.write(encoder_pb2.FetchRequest(grant=grant))

    def _open_message(self) -> encoder_pb2.FetchOpen:
        opening = self._opening
        return encoder_pb2.FetchOpen(
            fetch_id=opening.fetch_id,
            digest=opening.digest,
            rows=opening.rows.to_proto(),
            encode_id=opening.source.encode_id,
            encoder_epoch=opening.source.encoder_epoch,
            peers=self._receiver.peers(),
            request_id=opening.request_id,
            attempt=opening.attempt,
            rows_format=self._row_format.to_proto(),
        )

    async def _handle(self, response: encoder_pb2.FetchResponse) -> None:
        match response.WhichOneof("kind"):
            case "chunk":
                chunk = response.chunk
                self._receiver.chunk(chunk.segment, chunk.offset, chunk.data)
            case "written":
                await self._written(response.written)
            case "unwritten":
                await self._again(response.unwritten)
            case "ready":
                self._ready(response.ready)
            case "accepted":
                self._accepted(response.accepted)
            case "error":
                self._error(response.error)

    def _accepted(self, accepted: encoder_pb2.FetchAccepted) -> None:
        self._receiver.accepted(accepted.memory_types)
        segments: tuple[Span, ...] = ()
        if self._receiver.memory_type != STREAM:
            with suppress(ValueError):  # then nothing is known ahead
                segments = tuple(Span.from_proto(rows) for rows in accepted.segments)
        self._post(Accepted(self.fetch_id, segments))

    def _landed(self, seq: int, bank: int) -> None:
        """The receiving rank has been notified of a whole grant."""
        self._arrived.add(seq)
        self._take_in(self._sent.pop(seq), bank)

    def _take_in(self, grant: Grant, bank: int) -> None:
        self._post(Landed(self.fetch_id, grant.segment, grant.seq, bank))
        self._num_missing -= sum(len(place.rows) for place in grant.destinations)
        self._end_if_denied()

    def _end_if_denied(self) -> None:
        """All rows are here, but the encoder would wait for another grant of some, for ever."""
        if self._is_denied and not self._num_missing:
            self.send(Cancel(self.fetch_id))

    async def _written(self, written: encoder_pb2.FetchWritten) -> None:
        bank = None
        if written.seq not in self._arrived:
            bank = await self._receiver.landed(written.segment, written.seq, written.crc32)
        if written.seq in self._arrived:  # by now
            self._arrived.remove(written.seq)
            return
        grant = self._sent.pop(written.seq, None)
        if grant is None or bank is None:
            self._fail(Cause.LOST, "rows arrived incomplete or damaged")
            return
        self._take_in(grant, bank)

    async def _again(self, unwritten: encoder_pb2.FetchUnwritten) -> None:
        if unwritten.seq in self._arrived:  # the failure came after the last byte
            self._arrived.remove(unwritten.seq)
            self._is_denied = True
            self._end_if_denied()
            return
        grant = self._sent.get(unwritten.seq)
        places = await self._receiver.unwritten(
            unwritten.segment, unwritten.seq, aborted=unwritten.aborted
        )
        if grant is None or not places:
            self._fail(Cause.LOST, "a grant that nobody gave could not be written")
            return
        del self._sent[unwritten.seq]
        self._orders.put_nowait(grant)

    def _ready(self, ready: encoder_pb2.FetchReady) -> None:
        try:
            rows, row_format = Span.from_proto(ready.rows), RowFormat.from_proto(ready.format)
        except ValueError as error:
            self._fail(Cause.LOST, str(error))
            return
        self._post(Ready(self.fetch_id, ready.segment, rows, row_format))

    def _error(self, error: encoder_pb2.ItemError) -> None:
        try:
            cause = Cause.from_proto(error.cause)
        except ValueError:
            cause = Cause.LOST
        self._fail(cause, error.message)

    def _fail(self, cause: Cause, message: str) -> None:
        if not self._failed:
            self._failed = True
            self._post(Failed(self.fetch_id, cause, message))
