"""A stream that breaks while its reader is slow: what was ordered is withdrawn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from chiasm.plan import Span
from chiasm.rows import RowFormat
from chiasm.telemetry import EncoderMetrics
from chiasm.transport.base import STREAM
from chiasm.transport.grpc import StreamOutbound
from chiasm.v1 import common_pb2, encoder_pb2
from encoder_svc.fetch_session import FetchOpening
from encoder_svc.fetch_stream import FetchStream
from encoder_svc.fetch_table import FetchTable
from tests.unit.transfer.test_store import STATS, Bench, Zeros

FORMAT = RowFormat(1, 1, "float32")


async def nothing_more() -> AsyncIterator[encoder_pb2.FetchRequest]:
    await asyncio.Event().wait()
    yield encoder_pb2.FetchRequest()


async def test_a_write_behind_words_that_nobody_reads_is_withdrawn_with_the_stream() -> None:
    bench = Bench(rows=20)
    fetches = FetchTable(bench.store, epoch=3, row_format=FORMAT)
    encode_id, _ = bench.admit("a", 4)
    job = bench.store.media_complete(encode_id, b"m")
    assert job is not None
    for segment in range(2):
        rows = Span(2 * segment, 2 * segment + 2)
        bench.store.segment_ready(job.key, segment, rows, Zeros(2))
    bench.store.finished(job.key, STATS)
    session = fetches.open(FetchOpening(b"f", b"a", Span(0, 4), encode_id, 3, FORMAT))
    place = encoder_pb2.Destination(
        rows=common_pb2.Range(begin=0, end=2), length=2 * FORMAT.row_bytes, memory_type=STREAM
    )
    session.grant(encoder_pb2.FetchGrant(segment=0, destinations=[place]))
    assert session.has_grants()
    stream = FetchStream(
        session, nothing_more(), outbound=StreamOutbound(), peers=[], metrics=EncoderMetrics()
    )
    responses = stream.responses(grace_s=600)
    assert (await anext(responses)).HasField("accepted")
    for _ in range(20):
        await asyncio.sleep(0)  # one Ready waits to be sent, the other cannot even wait
    await responses.aclose()
    assert session.ended and not fetches.num_open
    fetches.check()
    bench.store.check()
