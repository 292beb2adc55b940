"""The store's rules, one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chiasm.errors import InvalidRequest, ResourceExhausted, TooLarge
from chiasm.plan import Cause, MediaPlan, Modality, Span
from encoder_svc.messages import EncodeStats
from encoder_svc.store import Admission, EmbeddingStore, EncodeOpening, Entry, EntryState

ROW = 4
STATS = EncodeStats(1, 2, 3)


class Zeros:
    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.nbytes = num_rows * ROW

    def read(self, begin: int, end: int) -> memoryview:
        return memoryview(bytes((end - begin) * ROW))


class Bench:
    """A store, and the jobs it cancelled."""

    def __init__(self, rows: int = 10, patches: int = 100, media: int = 100) -> None:
        self.cancelled: list[bytes] = []
        self.number = 0
        self.store = EmbeddingStore(
            cache_bytes=rows * ROW,
            row_bytes=ROW,
            max_pending_patches=patches,
            max_pending_media=media,
            cancel_job=self.cancelled.append,
        )

    def admit(self, name: str, rows: int = 4, **kwargs: object) -> tuple[bytes, Admission]:
        self.number += 1
        encode_id = str(self.number).encode()
        plan = MediaPlan(name.encode(), "f", Modality.IMAGE, 1, 1, 1, 1, (), rows, 1, "image/png")
        pending = kwargs.pop("pending_patches", 0)
        opening = replace(EncodeOpening(encode_id, plan, None, Span(0, rows), 1), **kwargs)
        admission = self.store.admit(opening, pending_patches=pending)  # type: ignore[arg-type]
        self.store.check()
        return encode_id, admission

    def finish(self, encode_id: bytes) -> Entry:
        job = self.store.media_complete(encode_id, b"m")
        assert job is not None
        rows = job.rows
        self.store.segment_ready(job.key, 0, rows, Zeros(len(rows)))
        self.store.finished(job.key, STATS)
        self.store.check()
        entry = self.store.find(encode_id)
        assert entry is not None
        return entry

    def made(self, name: str, rows: int = 4) -> tuple[bytes, Entry]:
        encode_id, _ = self.admit(name, rows)
        return encode_id, self.finish(encode_id)


def test_a_digest_is_encoded_once_and_joined_in_every_state() -> None:
    bench = Bench()
    first, new = bench.admit("a")
    assert (new.cached, new.media_needed) == (False, True)
    second, joined = bench.admit("a")
    assert (joined.cached, joined.media_needed) == (True, True)  # its medium is still coming in
    assert joined.entry is new.entry
    assert bench.store.media_complete(second, b"m") is not None
    assert bench.store.media_complete(first, b"m") is None  # another was first
    _, late = bench.admit("a")
    assert (late.cached, late.media_needed) == (True, False)
    assert bench.store.used_bytes == 4 * ROW


def test_finished_rows_stay_as_cache_and_the_oldest_go_first() -> None:
    bench = Bench()
    for name in ("a", "b"):
        encode_id, _ = bench.made(name)
        bench.store.end_encode(encode_id)
    encode_id, hit = bench.admit("a")  # a is the youngest again
    assert hit.cached and not hit.media_needed
    bench.store.end_encode(encode_id)
    bench.admit("c")
    assert bench.admit("a")[1].cached
    with pytest.raises(ResourceExhausted):
        bench.admit("b")


def test_what_someone_waits_for_is_kept_and_nothing_is_dropped_for_nothing() -> None:
    bench = Bench()
    held, _ = bench.made("a", 6)
    cached, _ = bench.made("b", 2)
    bench.store.end_encode(cached)
    with pytest.raises(ResourceExhausted):
        bench.admit("c", 5)
    assert bench.admit("b", 2)[1].cached
    with pytest.raises(TooLarge):
        bench.admit("d", 11)
    bench.store.end_encode(held)
    bench.admit("c", 5)


def test_a_repair_displaces_rows_that_are_ready_and_granted_to_nobody() -> None:
    bench = Bench()
    held, entry = bench.made("a", 6)
    granted = [True]
    bench.store.open_fetch(entry, b"f", has_grants=lambda: granted[0])
    seen: list[EntryState] = []
    entry.watchers.append(lambda: seen.append(entry.state))
    with pytest.raises(ResourceExhausted):
        bench.admit("c", 5)  # a first attempt drops nobody
    with pytest.raises(ResourceExhausted):
        bench.admit("c", 5, repair=True)  # rows are being written
    granted[0] = False
    bench.admit("c", 5, repair=True)
    assert seen == [EntryState.FAILED]
    assert entry.failure is not None and entry.failure[0] is Cause.EVICTED
    bench.store.end_fetch(entry, b"f")
    bench.store.end_encode(held)
    bench.store.check()


def test_first_attempts_are_displaced_before_repairs() -> None:
    bench = Bench()
    repair, _ = bench.admit("a", 4, repair=True)
    bench.finish(repair)
    first, entry = bench.made("b", 4)
    bench.admit("c", 5, repair=True)
    assert entry.state is EntryState.FAILED
    kept = bench.store.find(repair)
    assert kept is not None and kept.state is EntryState.FINISHED
    bench.store.end_encode(first)
    bench.store.check()


def test_unfinished_work_without_interest_is_cancelled() -> None:
    bench = Bench()
    first, _ = bench.admit("a")
    second, _ = bench.admit("a")
    job = bench.store.media_complete(first, b"m")
    bench.store.end_encode(first)
    assert bench.cancelled == []
    bench.store.end_encode(second)
    assert job is not None and bench.cancelled == [job.key]
    assert bench.store.used_bytes == 0
    bench.store.segment_ready(job.key, 0, job.rows, Zeros(4))  # too late: ignored
    bench.store.finished(job.key, STATS)
    bench.store.check()
    assert bench.store.has_ended(first)


def test_too_much_work_is_refused_but_not_the_only_piece() -> None:
    bench = Bench(patches=3, media=2)
    bench.admit("big", patches=50)
    with pytest.raises(ResourceExhausted):
        bench.admit("b", patches=1)
    bench = Bench(patches=3, media=2)
    with pytest.raises(ResourceExhausted):
        bench.admit("a", patches=2, pending_patches=2)
    bench.admit("a", 2)
    bench.admit("b", 2)
    with pytest.raises(ResourceExhausted, match="media"):
        bench.admit("c", 2)
    assert bench.admit("a", 2)[1].cached


def test_ids_are_used_once_and_a_digest_names_one_plan() -> None:
    bench = Bench()
    encode_id, admission = bench.admit("a")
    opening = admission.entry.opening
    with pytest.raises(InvalidRequest):
        bench.store.admit(opening, pending_patches=0)
    bench.store.end_encode(encode_id)
    with pytest.raises(InvalidRequest):
        bench.store.admit(opening, pending_patches=0)
    bench.admit("a")
    with pytest.raises(InvalidRequest):
        bench.admit("a", 5)
    bench.store.check()


@pytest.mark.parametrize(
    ("segment", "rows", "num_rows"),
    [
        (1, Span(0, 4), 4),
        (0, Span(1, 4), 3),
        (0, Span(0, 5), 5),
        (0, Span(0, 0), 0),
        (0, Span(0, 4), 3),
    ],
)
def test_rows_that_the_plan_does_not_have_fail_the_entry(segment, rows, num_rows) -> None:
    bench = Bench()
    encode_id, admission = bench.admit("a")
    job = bench.store.media_complete(encode_id, b"m")
    assert job is not None
    bench.store.segment_ready(job.key, segment, rows, Zeros(num_rows))
    assert admission.entry.state is EntryState.FAILED
    assert bench.cancelled == [job.key]
    bench.store.check()
    assert not bench.admit("a")[1].cached  # the next one starts afresh
    bench.store.end_encode(encode_id)
    bench.store.check()


def test_too_few_rows_fail_the_entry_at_its_end() -> None:
    bench = Bench()
    encode_id, admission = bench.admit("a")
    job = bench.store.media_complete(encode_id, b"m")
    assert job is not None
    bench.store.segment_ready(job.key, 0, Span(0, 3), Zeros(3))
    bench.store.finished(job.key, STATS)
    assert admission.entry.failure is not None
    bench.store.check()
