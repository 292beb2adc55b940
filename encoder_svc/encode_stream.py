"""The shell around one admitted Encode: takes the medium in, tells of segments and the outcome."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress

from chiasm.errors import ChiasmError, InvalidRequest
from chiasm.v1 import encoder_pb2
from encoder_svc.messages import Engine
from encoder_svc.store import Admission, EmbeddingStore, EncodeOpening, EntryState


class EncodeStream:
    """One gateway's interest in one entry, while its stream is open.

    Args:
        admission: What the store answered.
        opening: What was asked for.
        store: Takes the whole medium.
        engine: Gets the job.
    """

    def __init__(
        self,
        admission: Admission,
        opening: EncodeOpening,
        *,
        store: EmbeddingStore,
        engine: Engine,
    ) -> None:
        self._entry = admission.entry
        self._opening = opening
        self._store = store
        self._engine = engine
        self._media: bytearray | None = bytearray() if admission.media_needed else None
        self._half_closed = False
        self._error: ChiasmError | None = None
        self._wake = asyncio.Event()

    async def responses(
        self, requests: AsyncIterator[encoder_pb2.EncodeRequest]
    ) -> AsyncGenerator[encoder_pb2.EncodeResponse, None]:
        """Ready per segment, then Done or an error; returns on an error or on the half-close.

        Raises:
            InvalidRequest: The medium is longer or shorter than its plan says.
        """
        self._entry.watchers.append(self._wake.set)
        reader = asyncio.create_task(self._read(requests))
        try:
            async with aclosing(self._outcome()) as outcome:
                async for response in outcome:
                    yield response
        finally:
            self._entry.watchers.remove(self._wake.set)
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader

    async def _outcome(self) -> AsyncGenerator[encoder_pb2.EncodeResponse, None]:
        num_told = 0
        done_told = False
        while True:
            entry = self._entry
            while num_told < len(entry.segments):  # it may grow while one is being sent
                rows = entry.segments[num_told].rows.to_proto()
                ready = encoder_pb2.EncodeReady(segment=num_told, rows=rows)
                yield encoder_pb2.EncodeResponse(ready=ready)
                num_told += 1
            if entry.failure is not None:
                cause, message = entry.failure
                error = encoder_pb2.ItemError(cause=cause.to_proto(), message=message)
                yield encoder_pb2.EncodeResponse(error=error)
                return
            if entry.state is EntryState.FINISHED and not done_told:
                done_told = True
                yield encoder_pb2.EncodeResponse(done=self._done())
            if self._error is not None:
                raise self._error
            if self._half_closed:
                return
            await self._wake.wait()
            self._wake.clear()

    async def _read(self, requests: AsyncIterator[encoder_pb2.EncodeRequest]) -> None:
        try:
            async for request in requests:
                if request.WhichOneof("kind") != "chunk":
                    raise InvalidRequest("only chunks may follow the start")
                self._take(request.chunk)
            if self._media is not None and self._entry.state is EntryState.FILLING:
                raise InvalidRequest("the medium is shorter than its plan says")
        except ChiasmError as error:
            self._error = error
        self._half_closed = True
        self._wake.set()

    def _take(self, chunk: bytes) -> None:
        if self._media is None:  # not asked for, or another stream's medium was whole first
            return
        if len(self._media) + len(chunk) > self._opening.plan.media_bytes:
            raise InvalidRequest("the medium is longer than its plan says")
        self._media += chunk
        if len(self._media) == self._opening.plan.media_bytes:
            media, self._media = bytes(self._media), None
            job = self._store.media_complete(self._opening.encode_id, media)
            if job is not None:
                self._engine.submit(job)

    def _done(self) -> encoder_pb2.EncodeDone:
        stats = self._entry.stats
        assert stats is not None, "finished without stats"
        return encoder_pb2.EncodeDone(
            queue_ms=stats.queue_ms,
            preprocess_ms=stats.preprocess_ms,
            forward_ms=stats.forward_ms,
            substituted_frames=stats.substituted_frames,
        )
