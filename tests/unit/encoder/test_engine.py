"""Orchestration: segments in order, overlap, cancelling, failures that stay with their item."""

from __future__ import annotations

import io
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from chiasm.errors import InvalidMedia, InvalidRequest, TooLarge
from chiasm.plan import Cause, Span
from encoder_svc.engine import EncoderEngine, EngineLimits
from encoder_svc.geometry import Geometry, Unit
from encoder_svc.messages import EncodeJob
from encoder_svc.pixels.settings import PixelSettings
from encoder_svc.processor import Processor
from encoder_svc.work import PreparedUnit
from tests.fake_runner import FAKE_GEOMETRY, FakeRunner
from tests.unit.encoder.clips import HEIGHT, WIDTH, clip
from tests.unit.encoder.engine_bench import Bench
from tests.unit.encoder.plans import image_plan, job, video_plan
from tests.waiting import until

SETTINGS = PixelSettings(FAKE_GEOMETRY, mean=(0.0,) * 3, std=(1.0,) * 3)
LIMITS = EngineLimits(max_batch_patches=64, max_item_patches=400, segment_rows=8)


@pytest.fixture
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    options = getattr(request, "param", {})
    bench = Bench(
        FakeRunner(**options.get("runner", {})),
        options.get("processor", Processor(SETTINGS, SETTINGS)),
        options.get("limits", LIMITS),
    )
    yield bench
    bench.runner.may_run.set()
    await bench.engine.stop()
    assert bench.engine.pending_patches == 0


def picture(level: int = 100, cells: tuple[int, int] = (2, 2), priority: int = 0) -> EncodeJob:
    file = io.BytesIO()
    Image.new("L", (40, 30), level).save(file, "PNG")
    return job(image_plan(30, 40, cells=cells), file.getvalue(), priority=priority)


async def test_a_picture_becomes_one_segment(bench: Bench) -> None:
    work = picture(level=51)
    assert bench.engine.check(work.plan, None, work.rows) == 16
    await bench.encode(work)
    ((segment, rows, values),) = bench.sink.rows[work.key]
    assert (segment, rows) == (0, Span(0, 4))
    assert np.allclose(values, 0.2 + np.arange(8))
    stats = bench.sink.done[work.key]
    assert min(stats.queue_ms, stats.preprocess_ms, stats.forward_ms) > 0


async def test_a_large_picture_becomes_several(bench: Bench) -> None:
    work = picture(cells=(3, 6))  # 18 rows, more patches than one batch
    await bench.encode(work)
    spans = [(segment, rows) for segment, rows, _ in bench.sink.rows[work.key]]
    assert spans == [(0, Span(0, 8)), (1, Span(8, 16)), (2, Span(16, 18))]


async def test_pictures_that_wait_share_a_forward(bench: Bench) -> None:
    bench.runner.may_run.clear()
    jobs = [picture(level) for level in range(7)]
    for work in jobs:
        bench.engine.submit(work)
    assert bench.engine.pending_patches == 7 * 16
    await bench.held_back()
    bench.runner.may_run.set()
    await bench.sink.outcome(*(work.key for work in jobs))
    assert bench.runner.batches[0] == (16,)  # the first did not wait for company
    assert max(map(len, bench.runner.batches)) == 4  # 64 patches
    for level, work in enumerate(jobs):
        ((_, _, values),) = bench.sink.rows[work.key]
        assert np.allclose(values[:, 0], level / 255)


class LastHeldBack:
    """Prepares the last unit of each job when told to."""

    geometry: Geometry = FAKE_GEOMETRY

    def __init__(self) -> None:
        self.go = threading.Event()
        self._whole = Processor(SETTINGS, SETTINGS)

    def prepare(
        self, job: EncodeJob, units: Sequence[Unit], cancelled: threading.Event
    ) -> Iterator[PreparedUnit]:
        prepared = self._whole.prepare(job, units, cancelled)
        for _ in units[:-1]:
            yield next(prepared)
        self.go.wait()
        yield from prepared


async def test_a_clip_is_ready_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first segment is there before the last is even prepared."""
    monkeypatch.setattr("chiasm.runs.UNIT_PATCHES", 32)
    processor = LastHeldBack()
    bench = Bench(FakeRunner(), processor, LIMITS)
    indices = tuple(range(40))
    work = job(video_plan(HEIGHT, WIDTH, indices, cells=(1, 2)), clip(40))
    bench.engine.submit(work)
    await bench.sink.changed.wait()
    assert bench.sink.rows[work.key]
    assert work.key not in bench.sink.done and work.key not in bench.sink.failures
    processor.go.set()
    await bench.sink.outcome(work.key)
    segments = bench.sink.rows[work.key]
    assert [rows for _, rows, _ in segments] == [Span(i, i + 8) for i in range(0, 40, 8)]
    levels = np.concatenate([values[::2, 0] for _, _, values in segments]) * 255
    assert np.allclose(levels, [10 + 6 * (2 * i + 0.5) for i in range(20)], atol=2)
    await bench.engine.stop()


async def test_units_of_a_clip_run_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What else is asked for meanwhile changes no shape, so it changes no bit."""
    monkeypatch.setattr("chiasm.runs.UNIT_PATCHES", 16)
    bench.runner.may_run.clear()
    clips = [job(video_plan(HEIGHT, WIDTH, tuple(range(12))), clip(12)) for _ in range(2)]
    pictures = [picture() for _ in range(3)]
    for work in (*clips, *pictures):
        bench.engine.submit(work)
    await bench.held_back()
    bench.runner.may_run.set()
    await bench.sink.outcome(*(work.key for work in (*clips, *pictures)))
    assert bench.runner.batches.count((12,)) == 4  # three groups each
    assert not any(12 in sizes and len(sizes) > 1 for sizes in bench.runner.batches)
    assert max(map(len, bench.runner.batches)) > 1, "pictures still share"


async def test_a_frame_run_counts_rows_in_the_whole(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chiasm.runs.UNIT_PATCHES", 8)
    work = job(video_plan(HEIGHT, WIDTH, tuple(range(8))), clip(8), frames=Span(4, 8))
    await bench.encode(work)
    ((_, rows, values),) = bench.sink.rows[work.key]
    assert rows == Span(2, 4)
    assert np.allclose(values[:, 0] * 255, [10 + 6 * 4.5, 10 + 6 * 6.5], atol=2)


async def test_the_clients_faults_are_named(bench: Bench) -> None:
    """One bad picture among good ones harms itself alone."""
    good = [picture(level) for level in (10, 20, 30)]
    bad = replace(picture(), media=picture().media[:-30])
    lying = replace(picture(), plan=replace(picture().plan, source_width=41))
    await bench.encode(good[0], bad, good[1], lying, good[2])
    assert set(bench.sink.done) == {work.key for work in good}
    cause, message = bench.sink.failures[bad.key]
    assert cause is Cause.INVALID_MEDIA and "corrupt" in message
    assert bench.sink.failures[lying.key][0] is Cause.INVALID_MEDIA


def _refuse_bright(unit: PreparedUnit) -> str | None:
    return "not finite" if unit.patches.mean() > 0.9 else None


def _raise_on_bright(unit: PreparedUnit) -> str | None:
    if unit.patches.mean() > 0.9:
        raise RuntimeError("out of memory")
    return None


@pytest.mark.parametrize(
    ("bench", "message"),
    [
        ({"runner": {"verdict": _refuse_bright}}, "not finite"),
        ({"runner": {"verdict": _raise_on_bright}}, "the vision tower failed"),
    ],
    indirect=["bench"],
)
async def test_one_bad_forward_harms_its_item_alone(bench: Bench, message: str) -> None:
    """Non-finite rows, or a tower that raises, fail the one item; the others get their rows."""
    bench.runner.may_run.clear()
    jobs = [picture(level) for level in (10, 255, 20, 30)]
    for work in jobs:
        bench.engine.submit(work)
    await bench.held_back()
    bench.runner.may_run.set()
    await bench.sink.outcome(*(work.key for work in jobs))
    assert bench.sink.failures == {jobs[1].key: (Cause.LOST, message)}
    assert len(bench.sink.done) == 3
    await bench.encode(picture())  # and the engine lives on


class WrongCount(FakeRunner):
    """Makes one row too few."""

    def run(self, batch: Sequence[PreparedUnit], *, segment_rows: int) -> object:
        return [(outcome[0],) for outcome in super().run(batch, segment_rows=1)]


async def test_a_wrong_number_of_rows_is_no_ones_embedding() -> None:
    bench = Bench(WrongCount(), Processor(SETTINGS, SETTINGS), LIMITS)
    work = picture()
    await bench.encode(work)
    assert bench.sink.failures[work.key] == (
        Cause.LOST,
        "the vision tower made a wrong number of rows",
    )
    assert not bench.sink.rows
    await bench.engine.stop()


class SlowProcessor:
    """Yields zeros when told to; counts what it was asked for."""

    geometry: Geometry = FAKE_GEOMETRY

    def __init__(self) -> None:
        self.go = threading.Event()
        self.asked: list[bytes] = []
        self.error: Exception | None = None

    def prepare(
        self, job: EncodeJob, units: Sequence[Unit], cancelled: threading.Event
    ) -> Iterator[PreparedUnit]:
        for unit in units:
            self.asked.append(job.key)
            self.go.wait()
            if self.error is not None:
                raise self.error
            yield PreparedUnit(np.zeros((unit.patches, 1176), np.float32), unit.grid)


async def test_cancelled_jobs_cost_no_forward() -> None:
    processor = SlowProcessor()
    bench = Bench(FakeRunner(), processor, LIMITS)
    jobs = [picture() for _ in range(5)]
    for work in jobs:
        bench.engine.submit(work)
    await until(lambda: len(processor.asked) == 2)  # the others queue
    bench.engine.cancel(jobs[0].key)  # in preparation
    bench.engine.cancel(jobs[3].key)  # waiting
    bench.engine.cancel(b"unknown")
    assert bench.engine.pending_patches == 3 * 16
    processor.go.set()
    await bench.sink.outcome(jobs[1].key, jobs[2].key, jobs[4].key)
    assert jobs[3].key not in processor.asked
    assert sum(map(len, bench.runner.batches)) == 3
    assert jobs[0].key not in {*bench.sink.rows, *bench.sink.done, *bench.sink.failures}
    await bench.engine.stop()


async def test_a_key_may_come_again_while_its_old_forward_runs(bench: Bench) -> None:
    bench.runner.may_run.clear()
    first = picture(level=10)
    bench.engine.submit(first)
    await bench.held_back()
    bench.engine.cancel(first.key)
    again = replace(picture(level=200), key=first.key)
    bench.engine.submit(again)
    bench.runner.may_run.set()
    await bench.sink.outcome(first.key)
    ((_, _, values),) = bench.sink.rows[first.key]
    assert np.allclose(values[:, 0], 200 / 255)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidMedia("broken"), (Cause.INVALID_MEDIA, "broken")),
        (TooLarge("huge"), (Cause.TOO_LARGE, "huge")),
        (ZeroDivisionError("secret"), (Cause.LOST, "preprocessing failed")),
    ],
)
async def test_causes(error: Exception, expected: tuple[Cause, str]) -> None:
    processor = SlowProcessor()
    processor.error = error
    processor.go.set()
    bench = Bench(FakeRunner(), processor, LIMITS)
    work = picture()
    await bench.encode(work)
    assert bench.sink.failures[work.key] == expected
    await bench.engine.stop()


async def test_preprocessing_overlaps_the_forward(bench: Bench) -> None:
    bench.runner.may_run.clear()
    jobs = [picture() for _ in range(3)]
    for work in jobs:
        bench.engine.submit(work)
    await bench.held_back()
    assert bench.engine._at_tower and len(bench.engine._batcher._ready) >= 1
    bench.runner.may_run.set()
    await bench.sink.outcome(*(work.key for work in jobs))


@pytest.mark.parametrize(("cells", "waiting"), [((4, 4), 1), ((2, 2), 0)])
async def test_a_full_batch_waits_at_the_tower_and_a_small_one_for_company(
    bench: Bench, cells: tuple[int, int], waiting: int
) -> None:
    """64 patches fill a batch, 16 do not: they stay where others may still join them."""
    bench.runner.may_run.clear()
    jobs = [picture(cells=(4, 4)), picture(cells=cells)]
    bench.engine.submit(jobs[0])
    await bench.held_back()  # two that are prepared at once may change places
    bench.engine.submit(jobs[1])
    await bench.held_back()
    assert bench.engine._at_tower == 1 + waiting
    bench.runner.may_run.set()
    await bench.sink.outcome(*(work.key for work in jobs))
    assert bench.engine._at_tower == 0
    assert all(stats.queue_ms >= 0 for stats in bench.sink.done.values())


async def test_the_event_loop_stays_free() -> None:
    """Neither a picture that is being prepared nor a forward that runs holds the loop's thread."""
    processor = SlowProcessor()
    bench = Bench(FakeRunner(), processor, LIMITS)
    bench.runner.may_run.clear()
    work = picture()
    bench.engine.submit(work)
    await until(lambda: processor.asked)  # its thread waits: here we are
    assert not bench.engine._at_tower
    processor.go.set()
    await bench.held_back()  # and so with the tower's
    assert work.key not in bench.sink.done
    bench.runner.may_run.set()
    await bench.sink.outcome(work.key)
    await bench.engine.stop()


@pytest.mark.parametrize(
    "bench", [{"limits": replace(LIMITS, preprocess_workers=1)}], indirect=True
)
async def test_priority(bench: Bench) -> None:
    """One worker: what is prepared first is ready first."""
    bench.runner.may_run.clear()
    low = [picture(cells=(4, 4)) for _ in range(4)]  # 64 patches: a batch each
    for work in low:
        bench.engine.submit(work)
    high = picture(cells=(4, 4), priority=3)
    bench.engine.submit(high)
    bench.runner.may_run.set()
    await bench.sink.outcome(high.key, *(work.key for work in low))
    assert list(bench.sink.done).index(high.key) < 4


async def test_plans_are_checked_at_the_door(bench: Bench) -> None:
    work = picture()
    with pytest.raises(InvalidRequest):
        bench.engine.check(replace(work.plan, num_rows=3), None, work.rows)
    with pytest.raises(InvalidRequest, match="a plan of family 'glm4v'"):
        bench.engine.check(replace(work.plan, family="glm4v"), None, work.rows)
    big = image_plan(10, 10, cells=(20, 20))
    with pytest.raises(TooLarge, match="1600 patches are more than the 400"):
        bench.engine.check(big, None, Span(0, 400))


def test_processor_and_tower_must_agree() -> None:
    other = replace(SETTINGS, geometry=Geometry(patch=16, temporal_patch=2, merge=2))
    with pytest.raises(ValueError, match="the processor cuts"):
        EncoderEngine(FakeRunner(), Processor(other, other), LIMITS)
