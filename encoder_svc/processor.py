"""Bytes and a plan to patches: obeys the plan, derives nothing. Runs in pool threads.

A planned frame that cannot be decoded is replaced by the last good frame before it, which may lie
before the run, or by the first good one after it when there is none before. A clip is refused when
more than a quarter of a run's frames would be replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from PIL import Image

from chiasm.errors import Cancelled, InvalidMedia
from chiasm.plan import MediaPlan, Modality
from encoder_svc.geometry import Geometry, Unit
from encoder_svc.messages import EncodeJob
from encoder_svc.pixels.image import decode_image
from encoder_svc.pixels.patches import Patchifier
from encoder_svc.pixels.settings import PixelSettings
from encoder_svc.pixels.video import decode_frames
from encoder_svc.work import PatchMaker, PreparedUnit

MAX_LOSS = 0.25
"""Share of a run's frames that may be substituted."""


class Processor:
    """Prepares the units of any job. Holds no state between jobs.

    Args:
        image: How pictures become numbers.
        video: How frames of clips do.
        make: What turns frames into patches, and where; on the CPU unless said otherwise.

    Raises:
        ValueError: Pictures and clips are cut into different cells.
    """

    def __init__(
        self,
        image: PixelSettings,
        video: PixelSettings,
        make: Callable[[PixelSettings], PatchMaker] = Patchifier,
    ) -> None:
        if image.geometry != video.geometry:
            raise ValueError("the processor files give pictures and clips different patch sizes")
        self.geometry: Geometry = image.geometry
        self._resample = image.resample
        self._image = make(image)
        self._video = make(video)

    def prepare(
        self, job: EncodeJob, units: Sequence[Unit], cancelled: threading.Event
    ) -> Iterator[PreparedUnit]:
        """See `encoder_svc.work.Preprocessor`."""
        if job.plan.modality is Modality.IMAGE:
            yield from self._tiled(job, units) if self.geometry.tile else self._picture(job, units)
            return
        frames = self._frames(job, units, cancelled)
        for unit in units:
            wanted = (unit.end - unit.begin) * self.geometry.temporal_patch
            taken = [next(frames) for _ in range(wanted)]
            yield PreparedUnit(
                patches=self._video.patchify([frame for frame, _ in taken]),
                grid=unit.grid,
                substituted_frames=sum(substituted for _, substituted in taken),
            )

    def _picture(self, job: EncodeJob, units: Sequence[Unit]) -> Iterator[PreparedUnit]:
        picture = _decoded(job)
        (unit,) = units
        yield PreparedUnit(self._image.patchify([self._resize(picture, job.plan)]), unit.grid)

    def _tiled(self, job: EncodeJob, units: Sequence[Unit]) -> Iterator[PreparedUnit]:
        """Tiles of the resized picture row by row, then perhaps the whole of it as one more."""
        plan, picture = job.plan, _decoded(job)
        side = self.geometry.tile * self.geometry.patch
        canvas = picture.resize((plan.resized_width, plan.resized_height), self._resample)
        tiles = [
            canvas.crop((left, top, left + side, top + side))
            for top in range(0, plan.resized_height, side)
            for left in range(0, plan.resized_width, side)
        ]
        if plan.grids[0].t > len(tiles):
            tiles.append(picture)
        for unit in units:
            own = tiles[unit.begin : unit.end]
            made = [self._image.resize(tile, height=side, width=side) for tile in own]
            yield PreparedUnit(self._image.patchify(made), unit.grid)

    def _frames(
        self, job: EncodeJob, units: Sequence[Unit], cancelled: threading.Event
    ) -> Iterator[tuple[Any, bool]]:
        """Resized frames of the run, and whether each stands in for a lost one."""
        plan = job.plan
        decoded = decode_frames(
            job.media,
            plan.media_type,
            _run_indices(plan, units, self.geometry.temporal_patch),
            height=plan.source_height,
            width=plan.source_width,
        )
        allowed = int(MAX_LOSS * _run_length(units, self.geometry.temporal_patch))
        last: Any = None
        lost = waiting = 0
        for picture in decoded:
            _stop_if(cancelled)
            if picture is None:
                lost += 1
                if lost > allowed:
                    raise InvalidMedia("more than a quarter of the clip's frames cannot be decoded")
                if last is None and not waiting:
                    last = self._frame_before(job, units, cancelled)
                if last is None:
                    waiting += 1
                else:
                    yield last, True
                continue
            last = self._resize(picture, plan, video=True)
            for _ in range(waiting):
                yield last, True
            waiting = 0
            yield last, False

    def _frame_before(
        self, job: EncodeJob, units: Sequence[Unit], cancelled: threading.Event
    ) -> Any:
        """The last good frame before the run: what an encode of the whole clip would repeat."""
        plan = job.plan
        earlier = plan.frame_indices[: units[0].begin * self.geometry.temporal_patch]
        if not earlier:
            return None
        last: Image.Image | None = None
        for picture in decode_frames(
            job.media,
            plan.media_type,
            earlier,
            height=plan.source_height,
            width=plan.source_width,
        ):
            _stop_if(cancelled)
            last = picture or last
        return None if last is None else self._resize(last, plan, video=True)

    def _resize(self, picture: Image.Image, plan: MediaPlan, *, video: bool = False) -> Any:
        patchifier = self._video if video else self._image
        return patchifier.resize(picture, height=plan.resized_height, width=plan.resized_width)


def _decoded(job: EncodeJob) -> Image.Image:
    plan = job.plan
    return decode_image(
        job.media, plan.media_type, height=plan.source_height, width=plan.source_width
    )


def _stop_if(cancelled: threading.Event) -> None:
    if cancelled.is_set():
        raise Cancelled("nobody waits for this clip any more")


def _run_length(units: Sequence[Unit], temporal_patch: int) -> int:
    return (units[-1].end - units[0].begin) * temporal_patch


def _run_indices(plan: MediaPlan, units: Sequence[Unit], temporal_patch: int) -> list[int]:
    """Frame indices of the run; the last frame repeats until its temporal patch is full."""
    begin = units[0].begin * temporal_patch
    length = _run_length(units, temporal_patch)
    indices = list(plan.frame_indices[begin : begin + length])
    return indices + indices[-1:] * (length - len(indices))
