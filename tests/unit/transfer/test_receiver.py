"""The receiver's rules, one by one. The property test in tests/contract joins them up."""

from __future__ import annotations

import itertools

import pytest

from chiasm.plan import Cause, MediaPlan, Modality, Part, Promise, Source, Span
from chiasm.rows import RowFormat
from decoder_svc.embeddings.events import (
    Broken,
    Cancel,
    Demand,
    Failed,
    Fence,
    Fenced,
    Grant,
    ItemLanded,
    Landed,
    Open,
    PartLost,
    Quiesced,
    Ready,
    SlabRun,
)
from decoder_svc.embeddings.receiver import EmbeddingReceiver

FORMAT = RowFormat(2, 1, "float32")
A = Source(b"a", "one:1", 7)
B = Source(b"b", "two:2", 8)


def receiver(pages: int = 8, page_rows: int = 4, reserve_rows: int = 4) -> EmbeddingReceiver:
    ids = itertools.count()
    return EmbeddingReceiver(
        pages=pages,
        page_rows=page_rows,
        row_bytes=FORMAT.row_bytes,
        reserve_rows=reserve_rows,
        row_format=FORMAT,
        new_id=lambda: next(ids).to_bytes(2, "big"),
    )


def promise(num_rows: int = 10, cuts: tuple[int, ...] = (), item: int = 0) -> Promise:
    plan = MediaPlan(
        digest=bytes([item]) * 32,
        family="f",
        modality=Modality.IMAGE,
        source_height=1,
        source_width=1,
        resized_height=1,
        resized_width=1,
        grids=(),
        num_rows=num_rows,
        media_bytes=1,
        media_type="image/png",
    )
    edges = (0, *cuts, num_rows)
    parts = tuple(Part(i, Span(b, e), A) for i, (b, e) in enumerate(itertools.pairwise(edges)))
    return Promise(item, plan, 0, parts)


def started(r: EmbeddingReceiver, request: str = "r", **kwargs: object) -> list[bytes]:
    r.add(request, [promise(**kwargs)])  # type: ignore[arg-type]
    return [c.fetch_id for c in r.take_commands() if isinstance(c, Open)]


def ready(r: EmbeddingReceiver, fetch: bytes, begin: int, end: int, segment: int = 0) -> None:
    r.on_event(Ready(fetch, segment, Span(begin, end), FORMAT))


def grant(r: EmbeddingReceiver, end: int = 10, request: str = "r", item: int = 0) -> list[Grant]:
    r.grant([Demand(request, item, Span(0, end))])
    r.check()
    return [c for c in r.take_commands() if isinstance(c, Grant)]


def test_rows_land_in_pages_and_are_consumed() -> None:
    r = receiver()
    (fetch,) = started(r)
    assert grant(r) == []  # nothing is ready
    ready(r, fetch, 0, 10)
    (sent,) = grant(r)
    assert [d.rows for d in sent.destinations] == [Span(0, 10)]
    assert [d.length for d in sent.destinations] == [80]
    assert grant(r) == []  # idempotent
    assert r.landed_until("r", 0, 0) == 0
    r.on_event(Landed(fetch, 0, 1))
    assert r.landed_until("r", 0, 0) == 10
    assert r.take_notices() == [ItemLanded("r", 0)]
    assert r.locate("r", 0, Span(2, 10)) == (SlabRun(2, 8),)
    assert r.take_commands() == []  # everything was granted: the encoder ends by itself
    r.consume("r", 0, 5)
    assert r.num_free_pages == 6
    r.consume("r", 0, 10)
    assert r.num_free_pages == 8
    r.on_event(Quiesced(fetch))
    r.release("r")
    r.check()
    assert r.take_notices() == []


def test_a_prefix_hit_costs_no_fetch() -> None:
    r = receiver()
    r.add("r", [promise()])
    r.consume("r", 0, 10)
    assert r.take_commands() == []
    assert r.take_notices() == [ItemLanded("r", 0)]
    r.check()


def test_a_part_below_the_consumed_edge_is_cancelled() -> None:
    r = receiver()
    first, _ = started(r, cuts=(6,))
    r.consume("r", 0, 6)
    assert r.take_commands() == [Cancel(first)]


def test_a_cancelled_grant_frees_its_pages_only_when_quiesced() -> None:
    r = receiver()
    (fetch,) = started(r)
    ready(r, fetch, 0, 10)
    grant(r)
    r.release("r")
    assert r.take_commands() == [Cancel(fetch)]
    assert r.num_free_pages == 5
    r.on_event(Landed(fetch, 0, 1))  # too late to matter
    assert r.num_free_pages == 5
    r.check()
    r.on_event(Quiesced(fetch))
    assert r.num_free_pages == 8
    r.check()


def test_a_broken_stream_quarantines_until_fenced() -> None:
    r = receiver()
    (fetch,) = started(r)
    ready(r, fetch, 0, 10)
    grant(r)
    r.on_event(Broken(fetch))
    assert r.take_commands() == [Fence(fetch, "one:1", 7)]
    assert r.take_notices() == [
        PartLost("r", 0, 0, 1, Cause.LOST, "the stream to the encoder broke")
    ]
    assert r.num_free_pages == 5
    r.check()
    r.on_event(Fenced(fetch))
    assert r.num_free_pages == 8
    r.check()


def test_a_broken_stream_without_grants_needs_no_fence() -> None:
    r = receiver()
    (fetch,) = started(r)
    r.on_event(Broken(fetch))
    assert not [c for c in r.take_commands() if isinstance(c, Fence)]
    r.check()


def test_a_new_attempt_asks_only_for_missing_rows() -> None:
    r = receiver()
    (fetch,) = started(r)
    ready(r, fetch, 0, 6)
    grant(r)
    r.on_event(Landed(fetch, 0, 1))
    r.on_event(Broken(fetch))
    r.take_notices()
    r.redirect("r", 0, 0, 2, B)
    (opened,) = [c for c in r.take_commands() if isinstance(c, Open)]
    assert (opened.rows, opened.attempt, opened.source) == (Span(0, 10), 2, B)
    ready(r, opened.fetch_id, 0, 10)
    (sent,) = grant(r)
    assert [d.rows for d in sent.destinations] == [Span(6, 10)]
    r.on_event(Landed(opened.fetch_id, 0, 1))
    assert r.take_notices() == [ItemLanded("r", 0)]
    assert r.take_commands() == [Cancel(opened.fetch_id)]  # it still waits for the other grants
    r.check()


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_stale_redirect_is_ignored_and_counted(attempt: int) -> None:
    r = receiver()
    started(r)
    assert not r.redirect("r", 0, 0, attempt, B)
    assert not r.redirect("gone", 0, 0, 5, B)
    assert r.take_commands() == []
    assert r.counters.stale_attempts == 2
    assert r.redirect("r", 0, 0, 2, B)
    assert r.counters.stale_attempts == 2


def test_the_first_ready_source_wins() -> None:
    r = receiver()
    (first,) = started(r)
    r.add_source("r", 0, 0, 1, B)
    (hedge,) = [c.fetch_id for c in r.take_commands() if isinstance(c, Open)]
    ready(r, hedge, 0, 10)
    assert r.take_commands() == [Cancel(first)]
    ready(r, first, 0, 10)
    assert r.counters.stale_events == 1
    (sent,) = grant(r)
    assert sent.fetch_id == hedge


def test_a_part_is_lost_with_its_last_source_and_once() -> None:
    r = receiver()
    (first,) = started(r)
    r.add_source("r", 0, 0, 1, B)
    (hedge,) = [c.fetch_id for c in r.take_commands() if isinstance(c, Open)]
    r.on_event(Failed(first, Cause.EVICTED, "gone"))
    assert r.take_notices() == []
    r.on_event(Failed(hedge, Cause.TIMEOUT, "slow"))
    r.on_event(Quiesced(hedge))
    r.on_event(Broken(first))
    assert r.take_notices() == [PartLost("r", 0, 0, 1, Cause.TIMEOUT, "slow")]
    r.check()


@pytest.mark.parametrize(
    "bad",
    [
        Ready(b"\0\0", 0, Span(0, 11), FORMAT),
        Ready(b"\0\0", 0, Span(0, 0), FORMAT),
        Ready(b"\0\0", 0, Span(0, 10), RowFormat(3, 1, "float32")),
        Ready(b"\0\0", 0, Span(0, 10), RowFormat(4, 1, "bfloat16")),
        Ready(b"\0\0", 0, Span(0, 10), RowFormat(1, 2, "float32")),
    ],
)
def test_an_impossible_ready_loses_the_part_and_nothing_else(bad: Ready) -> None:
    r = receiver()
    started(r)
    r.on_event(bad)
    (lost,) = r.take_notices()
    assert isinstance(lost, PartLost)
    assert lost.cause is Cause.LOST
    assert grant(r) == []
    assert r.counters.refused_ready == 1


def test_overlapping_and_repeated_segments_are_refused() -> None:
    for segment, rows in ((1, Span(3, 8)), (0, Span(6, 10))):
        r = receiver()
        (fetch,) = started(r)
        ready(r, fetch, 0, 4)
        r.on_event(Ready(fetch, segment, rows, FORMAT))
        assert r.counters.refused_ready == 1
        r.check()


def test_wrong_landings_are_dropped() -> None:
    r = receiver()
    (fetch,) = started(r)
    ready(r, fetch, 0, 10)
    grant(r)
    r.on_event(Landed(fetch, 1, 1))
    r.on_event(Landed(fetch, 0, 2))
    r.on_event(Landed(b"??", 0, 1))
    assert r.landed_until("r", 0, 0) == 0
    assert r.counters.stale_events == 3


def test_the_reserve_is_for_the_next_rows_of_the_oldest() -> None:
    r = receiver(pages=4, reserve_rows=8)
    (old,) = started(r, "old", num_rows=16)
    (young,) = started(r, "young", num_rows=16)
    ready(r, young, 0, 16)
    demands = [Demand("old", 0, Span(0, 16)), Demand("young", 0, Span(0, 16))]
    r.grant(demands)
    assert r.num_free_pages == 2  # the young one may not touch the reserve
    ready(r, old, 8, 16, segment=1)
    r.grant(demands)
    assert r.num_free_pages == 2  # rows 8.. of the old one wait for a gap, so neither may they
    ready(r, old, 0, 8)
    r.grant(demands)
    assert r.num_free_pages == 0
    r.check()


def test_the_head_keeps_the_reserve_while_it_demands_nothing() -> None:
    r = receiver(pages=4, reserve_rows=8)
    (old,) = started(r, "old", num_rows=16)
    (young,) = started(r, "young", num_rows=16)
    ready(r, old, 0, 16)
    ready(r, young, 0, 16)
    r.grant([Demand("old", 0, Span(0, 4)), Demand("young", 0, Span(0, 4))])
    r.on_event(Landed(old, 0, 1))
    r.grant([Demand("old", 0, Span(4, 4)), Demand("young", 0, Span(0, 16))])
    assert r.num_free_pages == 2
    r.release("old")
    r.grant([Demand("young", 0, Span(0, 16))])
    assert r.num_free_pages == 0


def test_preemption_gives_pages_back_and_asks_again() -> None:
    r = receiver()
    first, second = started(r, num_rows=16, cuts=(8,))
    ready(r, first, 0, 8)
    grant(r)
    r.on_event(Landed(first, 0, 1))
    r.on_event(Quiesced(first))
    r.consume("r", 0, 4)
    r.take_notices()
    r.preempt("r", {0: 0})
    assert r.take_notices() == [PartLost("r", 0, 0, 1, Cause.PREEMPTED, "preempted")]
    assert r.take_commands() == []  # the second part's fetch goes on
    assert r.num_free_pages == 8
    r.redirect("r", 0, 0, 2, B)
    (again,) = [c.fetch_id for c in r.take_commands() if isinstance(c, Open)]
    ready(r, again, 0, 8)
    ready(r, second, 8, 16)
    assert len(grant(r, 16)) == 2
    r.on_event(Landed(again, 0, 1))
    r.on_event(Landed(second, 0, 1))
    assert r.take_notices() == [ItemLanded("r", 0)]
    r.check()


def test_an_item_landed_before_preemption_is_told_again() -> None:
    r = receiver()
    (fetch,) = started(r)
    ready(r, fetch, 0, 10)
    grant(r)
    r.on_event(Landed(fetch, 0, 1))
    r.consume("r", 0, 10)
    assert r.take_notices() == [ItemLanded("r", 0)]
    r.preempt("r", {0: 10})
    assert r.take_notices() == []
    r.preempt("r", {0: 6})
    (lost,) = r.take_notices()
    r.redirect("r", 0, 0, 2, B)
    (again,) = [c.fetch_id for c in r.take_commands() if isinstance(c, Open)]
    ready(r, again, 0, 10)
    (sent,) = grant(r)
    assert [d.rows for d in sent.destinations] == [Span(6, 10)]
    r.on_event(Landed(again, 0, 1))
    assert r.take_notices() == [ItemLanded("r", 0)]


def test_release_of_an_unknown_request_is_nothing() -> None:
    r = receiver()
    r.release("never")
    r.check()


def test_rows_in_a_lost_rank_are_asked_for_again_and_others_are_kept() -> None:
    r = receiver()
    (fetch,) = started(r)
    ready(r, fetch, 0, 10)
    grant(r)
    r.on_event(Landed(fetch, 0, 1, bank=1))
    (run,) = r.locate("r", 0, Span(0, 10))
    free = r.num_free_pages
    r.take_notices()
    r.lose_bank(0)
    assert r.locate("r", 0, Span(0, 10)) == (run,)
    assert not r.take_notices()
    r.lose_bank(1)
    (lost,) = r.take_notices()
    assert isinstance(lost, PartLost) and lost.cause is Cause.PREEMPTED
    assert r.num_free_pages > free and r.landed_until("r", 0, 0) == 0
    r.check()


def test_word_that_rows_landed_in_a_rank_that_is_gone_comes_too_late() -> None:
    r = receiver()
    (fetch,) = started(r)
    ready(r, fetch, 0, 10)
    grant(r)
    r.lose_bank(1)
    r.on_event(Landed(fetch, 0, 1, bank=1))
    assert r.landed_until("r", 0, 0) == 0
    (lost,) = r.take_notices()
    assert isinstance(lost, PartLost) and lost.cause is Cause.PREEMPTED
    r.on_event(Quiesced(fetch))
    r.check()
    assert r.num_free_pages == r._pool.num_pages
