"""The Encoder's rpcs: shells around store, engine and fetch table. Decides nothing about rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import grpc

from chiasm.bundles import BundleServer
from chiasm.config import EncoderConfig
from chiasm.digest import DIGEST_BYTES
from chiasm.errors import EmbeddingLost, InvalidRequest, TooLarge, Unavailable
from chiasm.plan import MediaPlan, Span
from chiasm.rows import RowFormat
from chiasm.server import load_interval_s
from chiasm.telemetry import EncoderMetrics
from chiasm.transport.base import Outbound
from chiasm.transport.grpc import StreamOutbound
from chiasm.v1 import common_pb2, encoder_pb2, encoder_pb2_grpc
from encoder_svc.encode_stream import EncodeStream
from encoder_svc.fetch_session import FetchOpening
from encoder_svc.fetch_stream import FetchStream
from encoder_svc.fetch_table import FetchTable
from encoder_svc.messages import Engine
from encoder_svc.second_level import SecondLevel
from encoder_svc.store import EmbeddingStore, EncodeOpening

Context = grpc.aio.ServicerContext[Any, Any]
T = TypeVar("T")

_MAX_AGENT_METADATA = 64 << 10
_MEDIA_IN_FLIGHT = 4  # of the largest size, held at once


class EncoderServicer(encoder_pb2_grpc.EncoderServicer):
    """Serves one engine. Everything runs on the event loop's thread.

    The owner calls `engine.start(servicer.store)` before it serves, and sets `draining` before it
    stops: new Encodes are refused then, open ones and Fetches end in peace.

    Args:
        engine: Makes the rows.
        config: Limits.
        description: What Describe answers; `epoch` and `rows` are this process's own.
        metrics: What is counted.
        outbound: Sends rows; on the Fetch streams unless another is given.
        second: Where evicted rows go.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        config: EncoderConfig,
        description: common_pb2.Description,
        metrics: EncoderMetrics,
        outbound: Outbound | None = None,
        second: SecondLevel | None = None,
    ) -> None:
        self.draining = False
        self._engine = engine
        self._config = config
        self._description = description
        self._metrics = metrics
        self._outbound = outbound or StreamOutbound()
        row_format = RowFormat.from_proto(description.rows)
        self.store = EmbeddingStore(
            cache_bytes=config.cache_bytes,
            row_bytes=row_format.row_bytes,
            max_pending_patches=config.max_pending_patches,
            max_pending_media=_MEDIA_IN_FLIGHT * config.max_media_bytes,
            cancel_job=engine.cancel,
            second=second,
        )
        self.fetches = FetchTable(self.store, epoch=description.epoch, row_format=row_format)

    async def Encode(
        self, requests: AsyncIterator[encoder_pb2.EncodeRequest], context: Context
    ) -> AsyncIterator[encoder_pb2.EncodeResponse]:
        """Gateway -> encoder; see encoder.proto."""
        start = (await _first(requests, "start")).start
        opening = _valid(lambda: self._encode_opening(start))
        admission = self.store.admit(opening, pending_patches=self._engine.pending_patches)
        self._metrics.cache_queries.inc()
        self._metrics.cache_hits.inc(admission.cached)
        self._metrics.cache_bytes.set(self.store.used_bytes)
        self.fetches.encode_began(opening.encode_id)
        stream = EncodeStream(admission, opening, store=self.store, engine=self._engine)
        outcome = "cancelled"
        try:
            yield encoder_pb2.EncodeResponse(
                accepted=encoder_pb2.EncodeAccepted(
                    encoder_epoch=self._description.epoch,
                    cached=admission.cached,
                    media_needed=admission.media_needed,
                )
            )
            async with aclosing(stream.responses(requests)) as responses:
                async for response in responses:
                    kind = response.WhichOneof("kind") or ""
                    outcome = {"error": "failed", "done": "ok"}.get(kind, outcome)
                    yield response
        finally:
            self.store.end_encode(opening.encode_id)
            self._metrics.requests.labels(outcome).inc()
            self._metrics.cache_bytes.set(self.store.used_bytes)

    async def EncodeMany(
        self, requests: AsyncIterator[common_pb2.Bundle], context: Context
    ) -> AsyncIterator[common_pb2.Bundle]:
        """Many Encodes of one gateway."""
        parse = encoder_pb2.EncodeRequest.FromString
        server = BundleServer(self.Encode, parse, method="EncodeMany")
        async with aclosing(server.serve(requests)) as bundles:
            async for bundle in bundles:
                yield bundle

    async def Fetch(
        self, requests: AsyncIterator[encoder_pb2.FetchRequest], context: Context
    ) -> AsyncIterator[encoder_pb2.FetchResponse]:
        """Decoder -> encoder; see encoder.proto."""
        message = (await _first(requests, "open")).open
        opening = _valid(lambda: FetchOpening.from_proto(message))
        if any(len(peer.agent_metadata) > _MAX_AGENT_METADATA for peer in message.peers):
            raise InvalidRequest("agent metadata over 64 KiB")
        stream = FetchStream(
            self.fetches.open(opening, memory_types=None),
            requests,
            outbound=self._outbound,
            peers=list(message.peers),
            metrics=self._metrics,
        )
        async with aclosing(stream.responses(grace_s=self._config.fetch_grace_s)) as responses:
            async for response in responses:
                yield response

    async def Fence(
        self, request: encoder_pb2.FenceRequest, context: Context
    ) -> encoder_pb2.FenceResponse:
        """Answers when nothing of that fetch is written any more, or ever will be."""
        # Another epoch's writer died with its process; our epoch in the answer says so.
        if request.encoder_epoch in (0, self._description.epoch):
            session = self.fetches.fence(request.fetch_id)
            if session is not None:
                ended = asyncio.Event()
                session.on_end.append(ended.set)
                await ended.wait()
        return encoder_pb2.FenceResponse(encoder_epoch=self._description.epoch)

    async def Describe(
        self, request: common_pb2.DescribeRequest, context: Context
    ) -> common_pb2.Description:
        """Gateway, decoder -> encoder: who this is."""
        return self._description

    async def WatchLoad(
        self, request: common_pb2.WatchLoadRequest, context: Context
    ) -> AsyncIterator[common_pb2.Load]:
        """The load at once, then every interval."""
        while True:
            yield self.load()
            await asyncio.sleep(load_interval_s(request))

    def load(self) -> common_pb2.Load:
        """Advice for routing."""
        return common_pb2.Load(
            running=self.store.num_encodes,
            pending_patches=self._engine.pending_patches + self.store.filling_patches,
            embedding_bytes_free=self.store.free_bytes,
            embedding_bytes_total=self.store.cache_bytes,
            draining=self.draining,
        )

    def _encode_opening(self, start: encoder_pb2.EncodeStart) -> EncodeOpening:
        if self.draining:
            raise Unavailable("this encoder is shutting down")
        if start.encoder_epoch not in (0, self._description.epoch):
            raise EmbeddingLost("another life of this encoder was meant")
        if not start.encode_id:
            raise InvalidRequest("an encode needs an id")
        plan = MediaPlan.from_proto(start.plan)
        if plan.media_bytes > self._config.max_media_bytes:
            raise TooLarge(f"a medium of {plan.media_bytes} bytes is over the limit")
        if not plan.media_bytes:
            raise InvalidRequest("the medium is empty")
        if len(plan.digest) != DIGEST_BYTES:
            raise InvalidRequest(f"a digest has {DIGEST_BYTES} bytes, not {len(plan.digest)}")
        frames = Span.from_proto(start.frames) if start.HasField("frames") else None
        if frames == Span(0, len(plan.frame_indices)):
            frames = None  # the whole medium is one entry, however it is named
        rows = Span.from_proto(start.rows) if start.HasField("rows") else Span(0, plan.num_rows)
        patches = self._engine.check(plan, frames, rows)
        if not len(rows) or rows.end > plan.num_rows:
            raise InvalidRequest(f"rows [{rows.begin}, {rows.end}) are not in the plan")
        return EncodeOpening(
            encode_id=start.encode_id,
            plan=plan,
            frames=frames,
            rows=rows,
            patches=patches,
            priority=start.context.priority,
            repair=start.repair,
            segments=self._engine.segments(plan, frames, rows),
        )


async def _first(requests: AsyncIterator[T], kind: str) -> T:
    message = await anext(requests, None)
    if message is None or not message.HasField(kind):  # type: ignore[attr-defined]
        raise InvalidRequest(f"the first message must be `{kind}`")
    return message


def _valid(parse: Callable[[], T]) -> T:
    """Values that cannot be are the client's fault."""
    try:
        return parse()
    except ValueError as error:
        raise InvalidRequest(str(error)) from error
