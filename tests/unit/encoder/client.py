"""A small client of encoder workers: gateway and decoder in one, over gRPC alone."""

from __future__ import annotations

import asyncio
import os
import zlib
from dataclasses import dataclass, field

import grpc
import numpy as np

from chiasm.channel import connect
from chiasm.plan import MediaPlan, Span
from chiasm.rows import RowFormat
from chiasm.v1 import common_pb2, encoder_pb2, encoder_pb2_grpc


@dataclass
class Fetched:
    """What one Fetch brought: values of each row, and its segments in order."""

    values: np.ndarray
    segments: list[Span] = field(default_factory=list)


class EncoderClient:
    """Calls one worker."""

    def __init__(self, address: str, *, row_format: RowFormat | None = None) -> None:
        self.channel = connect(address)
        self.stub = encoder_pb2_grpc.EncoderStub(self.channel)
        self.epoch = 0
        self._format = row_format or RowFormat(hidden_size=128, levels=1, dtype="float32")

    async def describe(self) -> common_pb2.Description:
        return await self.stub.Describe(common_pb2.DescribeRequest())

    async def start_encode(
        self,
        plan: MediaPlan,
        data: bytes,
        encode_id: bytes,
        *,
        frames: Span | None = None,
        rows: Span | None = None,
        cached: bool = False,
    ) -> grpc.aio.StreamStreamCall:
        """An accepted Encode whose medium, unless it is there already, is sent."""
        call = self.stub.Encode()
        start = encoder_pb2.EncodeStart(
            context=common_pb2.RequestContext(request_id="r", model="demo"),
            encode_id=encode_id,
            plan=plan.to_proto(),
            frames=frames.to_proto() if frames else None,
            rows=rows.to_proto() if rows else None,
        )
        await call.write(encoder_pb2.EncodeRequest(start=start))
        accepted = (await call.read()).accepted
        assert accepted.cached == cached and accepted.media_needed != cached
        self.epoch = accepted.encoder_epoch
        for at in range(0, 0 if cached else len(data), 1 << 20):
            await call.write(encoder_pb2.EncodeRequest(chunk=data[at : at + (1 << 20)]))
        return call

    async def fetch(
        self, plan: MediaPlan, encode_id: bytes, *, rows: Span | None = None
    ) -> Fetched:
        """All rows of an item or of a part, as a decoder fetches them: granted when ready."""
        rows = rows or Span(0, plan.num_rows)
        call = self.stub.Fetch()
        opening = encoder_pb2.FetchOpen(
            fetch_id=os.urandom(16),
            digest=plan.digest,
            rows=rows.to_proto(),
            encode_id=encode_id,
            encoder_epoch=self.epoch,
            rows_format=self._format.to_proto(),
            request_id="r",
            attempt=1,
        )
        await call.write(encoder_pb2.FetchRequest(open=opening))
        width = self._format.row_bytes
        slab = bytearray(len(rows) * width)
        segments: dict[int, Span] = {}
        kinds = []
        async with asyncio.timeout(60):
            while (message := await call.read()) is not grpc.aio.EOF:
                kinds.append(message.WhichOneof("kind"))
                assert kinds[-1] != "error", message
                if kinds[-1] == "ready":
                    ready = Span.from_proto(message.ready.rows)
                    segments[message.ready.segment] = ready
                    grant = self._grant(message.ready.segment, ready, rows)
                    await call.write(encoder_pb2.FetchRequest(grant=grant))
                elif kinds[-1] == "chunk":
                    first = segments[message.chunk.segment].begin - rows.begin
                    at = first * width + message.chunk.offset
                    slab[at : at + len(message.chunk.data)] = message.chunk.data
                elif kinds[-1] == "written":
                    ready = segments[message.written.segment]
                    span = slice(*((at - rows.begin) * width for at in (ready.begin, ready.end)))
                    assert zlib.crc32(slab[span]) == message.written.crc32
        assert kinds[-2:] == ["done", "quiesced"]
        values = np.frombuffer(bytes(slab), np.float32).reshape(len(rows), -1)
        return Fetched(values, [segments[index] for index in sorted(segments)])

    def _grant(self, segment: int, ready: Span, rows: Span) -> encoder_pb2.FetchGrant:
        width = self._format.row_bytes
        destination = encoder_pb2.Destination(
            memory_type="stream",
            address=(ready.begin - rows.begin) * width,
            length=len(ready) * width,
            rows=ready.to_proto(),
        )
        return encoder_pb2.FetchGrant(segment=segment, destinations=[destination])
