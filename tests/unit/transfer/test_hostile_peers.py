"""Whatever a peer says, it costs its own fetch at most."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable

import pytest

from chiasm.fakes import serving
from chiasm.plan import Cause, Source, Span
from chiasm.rows import RowFormat
from chiasm.transport import Destination
from chiasm.v1 import common_pb2, encoder_pb2, encoder_pb2_grpc
from decoder_svc.embeddings.events import (
    Broken,
    Demand,
    Failed,
    Fenced,
    FetchEvent,
    Landed,
    Open,
    PartLost,
    Quiesced,
    Ready,
)
from encoder_svc.fetch_session import FetchOpening, Write
from encoder_svc.fetch_table import FetchTable
from tests.unit.transfer.loopback import FORMAT, PAGE_ROWS, ROW, decoder, media_plan
from tests.unit.transfer.test_receiver import FORMAT as SMALL
from tests.unit.transfer.test_receiver import promise, receiver
from tests.unit.transfer.test_store import Bench

R = encoder_pb2.FetchResponse


def ready(begin: int, end: int, row_format: common_pb2.RowFormat | None = None) -> R:
    return R(
        ready=encoder_pb2.FetchReady(
            segment=0,
            rows=common_pb2.Range(begin=begin, end=end),
            format=row_format or FORMAT.to_proto(),
        )
    )


def chunk(offset: int, size: int, segment: int = 0) -> R:
    data = b"\7" * size
    return R(chunk=encoder_pb2.FetchChunk(segment=segment, offset=offset, data=data))


def written(seq: int, crc32: int = 0, segment: int = 0) -> R:
    return R(written=encoder_pb2.FetchWritten(segment=segment, seq=seq, crc32=crc32))


PAGE = PAGE_ROWS * ROW

ONCE_READY = [
    [chunk(0, PAGE), written(1, crc32=5)],  # a wrong checksum
    [chunk(0, PAGE - 1), written(1)],  # too short
    [written(1)],  # nothing at all
    [written(7)],  # a grant that never was
    [chunk(0, 10 * PAGE), written(1)],  # more than was granted
    [chunk(1 << 62, 8), written(1)],  # far away
    [chunk(8, 8), written(1)],  # out of order
    [chunk(0, PAGE, segment=9), written(1)],
    [ready(0, 8)],  # twice
    [R()],  # an empty message, then the end without Quiesced
]
AT_ONCE = [
    [ready(8, 0)],
    [ready(0, 1 << 60)],
    [ready(0, 8, common_pb2.RowFormat(hidden_size=16, levels=1))],
    [ready(0, 8, common_pb2.RowFormat(hidden_size=16, levels=1, dtype=4))],
    [ready(0, 8, common_pb2.RowFormat(hidden_size=1 << 31, levels=1 << 31, dtype=1))],
    [R(error=encoder_pb2.ItemError())],
    [R(error=encoder_pb2.ItemError(cause=77, message="?"))],
    [chunk(0, PAGE)],
    [R(quiesced=encoder_pb2.FetchQuiesced())],
    [],
]


class Scripted(encoder_pb2_grpc.EncoderServicer):
    """Says `first`, waits for a grant when there is more to say, says `then`, and hangs up."""

    def __init__(self, first: list[R], then: list[R]) -> None:
        self._first = first
        self._then = then

    async def Fetch(self, requests: AsyncIterator[encoder_pb2.FetchRequest], context: object):
        await anext(requests)
        for response in self._first:
            yield response
        if self._then:
            await anext(requests)
        for response in self._then:
            yield response


@pytest.mark.parametrize(
    ("first", "then"),
    [([], at_once) for at_once in AT_ONCE] + [([ready(0, 8)], then) for then in ONCE_READY],
)
async def test_a_lying_encoder_costs_its_part_and_touches_no_other_memory(first, then) -> None:
    if not first:
        first, then = then, []
    async with serving(Scripted(first, then)) as server, decoder() as d:
        before = bytes(d.slab.view())
        d.want("r", media_plan("a", 8), [Source(b"e", server.address, 1)])
        await d.until(lambda: bool(d.notices))
        (lost,) = d.notices
        assert isinstance(lost, PartLost) and lost.cause is Cause.LOST
        await d.idle()
        outside = bytes(d.slab.view())[PAGE:]
        assert outside == before[PAGE:]
        d.drop("r")
        d.receiver.check()


@pytest.mark.parametrize(
    "stray", [chunk(0, 10 * PAGE), chunk(1 << 62, 8), chunk(8, 8), chunk(0, PAGE, segment=9)]
)
async def test_chunks_that_nobody_asked_for_are_counted(stray: R) -> None:
    async with serving(Scripted([ready(0, 8)], [stray, stray])) as server, decoder() as d:
        d.want("r", media_plan("a", 8), [Source(b"e", server.address, 1)])
        await d.until(lambda: bool(d.notices))
        await d.idle()
        assert d.dropped == [2]


async def test_an_encoder_that_never_says_quiesced_is_broken_off() -> None:
    class Deaf(Scripted):
        async def Fetch(self, requests, context):
            async for response in super().Fetch(requests, context):
                yield response
            await asyncio.sleep(60)

    async with serving(Deaf([ready(0, 8)], [chunk(0, 8)])) as server, decoder() as d:
        d.fetcher._cancel_s = 0.1
        d.want("r", media_plan("a", 8), [Source(b"e", server.address, 1)])
        await d.until(lambda: d.receiver.num_free_pages < 16)
        d.drop("r")
        await d.idle()
        assert any(isinstance(event, Broken) for event in d.events)


def random_event(source: random.Random, fetches: list[bytes]) -> FetchEvent:
    fetch = source.choice([*fetches, b"??"])
    begin = source.randint(-2, 12)
    end = begin + source.randint(0, 6)
    makers: list[Callable[[], FetchEvent]] = [
        lambda: Ready(fetch, source.randint(0, 3), Span(begin, end), SMALL),
        lambda: Ready(fetch, 0, Span(0, 4), RowFormat(9, 9, "float16")),
        lambda: Landed(fetch, source.randint(0, 3), source.randint(0, 4)),
        lambda: Failed(fetch, source.choice(list(Cause)), "x"),
        lambda: Quiesced(fetch),
        lambda: Broken(fetch),
        lambda: Fenced(fetch),
    ]
    return source.choices(makers, weights=(8, 1, 8, 1, 1, 1, 1))[0]()


def test_no_order_of_events_breaks_the_receiver() -> None:
    for seed in range(300):
        throw_events(seed)


def throw_events(seed: int) -> None:
    source = random.Random(seed)
    r = receiver(pages=4, page_rows=2)
    r.add("r", [promise(10, cuts=(4,)), promise(6, item=1)])
    fetches: list[bytes] = []
    attempt = 1
    for _ in range(60):
        fetches += [c.fetch_id for c in r.take_commands() if isinstance(c, Open)]
        r.on_event(random_event(source, fetches))
        r.check()
        for notice in r.take_notices():
            if isinstance(notice, PartLost):
                attempt += 1
                where = (notice.item, notice.part)
                r.redirect("r", *where, attempt, Source(b"e", "x:1", 1))
        r.grant([Demand("r", 0, Span(0, 10)), Demand("r", 1, Span(0, 6))])
        r.check()
    r.release("r")
    r.check()


def table() -> tuple[FetchTable, Bench]:
    bench = Bench(rows=20)
    return FetchTable(bench.store, epoch=3, row_format=RowFormat(1, 1, "float32")), bench


def random_grant(source: random.Random) -> encoder_pb2.FetchGrant:
    places = []
    for _ in range(source.randint(0, 3)):
        begin = source.randint(0, 12)
        rows = common_pb2.Range(begin=begin, end=max(0, begin + source.randint(-1, 6)))
        length = max(0, rows.end - rows.begin) * source.choice((4, 4, 4, 5))
        kind = source.choice(("stream", "stream", "stream", "VRAM"))
        places.append(encoder_pb2.Destination(rows=rows, length=length, memory_type=kind))
    return encoder_pb2.FetchGrant(segment=source.randint(0, 2), destinations=places)


def test_no_grant_makes_a_session_write_what_it_may_not() -> None:
    for seed in range(300):
        throw_grants(seed)


def throw_grants(seed: int) -> None:
    source = random.Random(seed)
    fetches, bench = table()
    encode_id, entry = bench.made("a", 10)
    opened = Span(2, 9)
    opening = FetchOpening(b"f", b"a", opened, encode_id, 3, RowFormat(1, 1, "float32"))
    session = fetches.open(opening)
    sent: list[Destination] = []
    for _ in range(20):
        session.grant(random_grant(source))
        for output in iter(session.take, None):
            if isinstance(output, Write):
                sent += output.destinations
                session.write_ended(source.choice((0, 0, 0, None)))
        fetches.check()
    for place in sent:
        assert place.rows.intersect(opened) == place.rows and len(place.rows)
        assert place.length == len(place.rows) * 4
    rows = [row for place in sent for row in range(place.rows.begin, place.rows.end)]
    assert len(rows) == len(set(rows))
    session.cancel()
    assert session.ended and fetches.num_open == 0
    assert not entry.fetches and not entry.watchers
    bench.store.check()
