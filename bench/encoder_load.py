"""Work for one encoder engine in a process of its own: pictures from JPEG files, or a long clip."""

from __future__ import annotations

import asyncio
import io
import multiprocessing
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image

from bench.tower import QWEN_7B, TINY, random_tower
from chiasm.plan import Cause, Grid, MediaPlan, Modality, Span
from chiasm.runs import frame_runs
from encoder_svc.engine import EncoderEngine, EngineLimits
from encoder_svc.geometry import Unit
from encoder_svc.messages import EncodeJob, EncodeStats, RowBuffer
from encoder_svc.pixels.device import DevicePatchifier
from encoder_svc.pixels.image import decode_image
from encoder_svc.pixels.settings import PixelSettings
from encoder_svc.runner import TowerRunner
from encoder_svc.work import PreparedUnit

SOURCE = (360, 640)  # of a clip's frames
PLANNED = (364, 644)


@dataclass(frozen=True, slots=True)
class Load:
    """What each worker gets."""

    kind: str  # pictures or clip
    count: int  # pictures a worker, or frames of the whole clip
    size: tuple[int, int] = (1120, 1120)
    workers: int = 1
    tiny: bool = False


def picture(height: int, width: int, *, seed: int = 0, noise: bool = False) -> Image.Image:
    """Something like a photograph, which JPEG files hold in a tenth of a byte a pixel; or noise."""
    rng = np.random.default_rng(seed)
    if noise:
        return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
    total = np.zeros((height, width, 3), np.float32)
    for step in (4, 16, 64, 256):
        coarse = rng.standard_normal((height // step + 2, width // step + 2, 3))
        for channel in range(3):
            plane = Image.fromarray(coarse[..., channel].astype(np.float32))
            total[..., channel] += np.asarray(plane.resize((width, height))) * step**0.7
    low, high = total.min(), total.max()
    return Image.fromarray(((total - low) / (high - low) * 255).astype(np.uint8))


def jpeg(image: Image.Image, *, quality: int = 90) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()


def settings() -> PixelSettings:
    return PixelSettings(QWEN_7B.geometry)


class Pixels:
    """A `Preprocessor` without a demuxer: a clip's frames are there, decoded."""

    def __init__(self, maker: DevicePatchifier) -> None:
        self.geometry = QWEN_7B.geometry
        self._maker = maker
        self._frames = [picture(*SOURCE, seed=seed) for seed in range(8)]

    def prepare(
        self, job: EncodeJob, units: Sequence[Unit], cancelled: threading.Event
    ) -> Iterator[PreparedUnit]:
        plan = job.plan
        size = {"height": plan.resized_height, "width": plan.resized_width}
        if plan.modality is Modality.IMAGE:
            image = decode_image(
                job.media, plan.media_type, height=plan.source_height, width=plan.source_width
            )
            yield PreparedUnit(
                self._maker.patchify([self._maker.resize(image, **size)]), units[0].grid
            )
            return
        for unit in units:
            frames = [
                self._maker.resize(self._frames[index % 8], **size)
                for index in range(2 * unit.begin, 2 * unit.end)
            ]
            yield PreparedUnit(self._maker.patchify(frames), unit.grid)


class Count:
    """A `Sink` that waits for a number of jobs."""

    def __init__(self, jobs: int) -> None:
        self._left = jobs
        self.done = asyncio.Event()

    def segment_ready(self, key: bytes, segment: int, rows: Span, buffer: RowBuffer) -> None:
        pass

    def finished(self, key: bytes, stats: EncodeStats) -> None:
        self._left -= 1
        if not self._left:
            self.done.set()

    def failed(self, key: bytes, cause: Cause, message: str) -> None:
        raise SystemExit(f"a job failed: {message}")


def _jobs(load: Load, index: int) -> list[EncodeJob]:
    if load.kind == "clip":
        plan = _plan(Modality.VIDEO, SOURCE, PLANNED, frames=load.count)
        run = frame_runs(plan, load.workers)[index]
        return [EncodeJob(b"clip", plan, run.frames, run.rows, b"")]
    height, width = load.size
    files = [jpeg(picture(height, width, seed=seed)) for seed in range(4)]
    plan = _plan(Modality.IMAGE, load.size, load.size, frames=0)
    rows = Span(0, plan.num_rows)
    return [
        EncodeJob(number.to_bytes(4, "big"), plan, None, rows, files[number % len(files)])
        for number in range(load.count)
    ]


def _plan(
    modality: Modality, source: tuple[int, int], planned: tuple[int, int], *, frames: int
) -> MediaPlan:
    grid = Grid(max(1, frames // 2), planned[0] // 14, planned[1] // 14)
    return MediaPlan(
        digest=bytes(32),
        family="qwen2_5_vl",
        modality=modality,
        source_height=source[0],
        source_width=source[1],
        resized_height=planned[0],
        resized_width=planned[1],
        grids=(grid,),
        num_rows=grid.patches // 4,
        media_bytes=0,
        media_type="image/jpeg" if modality is Modality.IMAGE else "video/mp4",
        frame_indices=tuple(range(frames)),
        frame_timestamps_s=tuple(index / 2 for index in range(frames)),
        seconds_per_grid=1.0,
    )


async def _encode(engine_of: partial[EncoderEngine], jobs: list[EncodeJob]) -> float:
    engine, count = engine_of(), Count(len(jobs))
    engine.start(count)
    began = time.perf_counter()
    for job in jobs:
        engine.submit(job)
    await count.done.wait()
    elapsed = time.perf_counter() - began
    await engine.stop()
    return elapsed


def work(loads: Sequence[Load], index: int, barrier: Any, results: Any) -> None:
    """One worker: warms up, then takes its part in each load together with the others."""
    cuda = torch.cuda.is_available()
    device = torch.device(f"cuda:{index}" if cuda else "cpu")
    dtype = torch.bfloat16 if cuda else torch.float32
    if cuda:
        torch.cuda.set_device(device)
    tower = random_tower(TINY if loads[0].tiny else QWEN_7B, device=device, dtype=dtype)
    runner = TowerRunner(tower, row_dtype=dtype)
    maker = DevicePatchifier(settings(), device=device, dtype=dtype)
    limits = EngineLimits(
        max_batch_patches=16384, max_item_patches=1 << 20, segment_rows=4096, preprocess_workers=8
    )
    engine_of = partial(EncoderEngine, runner, Pixels(maker), limits)
    mine = [_jobs(load, index) if index < load.workers else [] for load in loads]
    for jobs in mine:
        if jobs:
            asyncio.run(_encode(engine_of, jobs[:24]))
    for number, jobs in enumerate(mine):
        barrier.wait()
        if jobs:
            results.put((number, asyncio.run(_encode(engine_of, jobs))))


def seconds(loads: Sequence[Load]) -> list[float]:
    """Of the slowest worker, for each load."""
    context = multiprocessing.get_context("spawn")
    workers = max(load.workers for load in loads)
    barrier, results = context.Barrier(workers), context.Queue()
    processes = [
        context.Process(target=work, args=(loads, index, barrier, results))
        for index in range(workers)
    ]
    for process in processes:
        process.start()
    slowest = [0.0] * len(loads)
    for _ in range(sum(load.workers for load in loads)):
        number, elapsed = results.get(timeout=300)
        slowest[number] = max(slowest[number], elapsed)
    for process in processes:
        process.join()
    return slowest
