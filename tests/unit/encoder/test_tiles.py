"""Pictures cut into tiles: in units of whole tiles, row by row, the whole picture last."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
from PIL import Image

from chiasm.errors import InvalidRequest
from chiasm.plan import Grid, MediaPlan, Modality, Span
from encoder_svc.geometry import Geometry, resolve_run
from encoder_svc.messages import EncodeJob
from encoder_svc.pixels.settings import PixelSettings
from encoder_svc.processor import Processor
from tests.integration.media import encode

GEOMETRY = Geometry(patch=14, temporal_patch=1, merge=2, tile=32)
SETTINGS = PixelSettings(GEOMETRY)
SIDE = 448


def plan(rows: int, columns: int, groups: int) -> MediaPlan:
    return MediaPlan(
        digest=b"d" * 32,
        family="internvl",
        modality=Modality.IMAGE,
        source_height=rows * SIDE,
        source_width=columns * SIDE,
        resized_height=rows * SIDE,
        resized_width=columns * SIDE,
        grids=(Grid(groups, 32, 32),),
        num_rows=groups * 256,
        media_bytes=1,
        media_type="image/png",
    )


def test_tiles_in_units() -> None:
    """Every tile has a grey of its own; the thumbnail has all of them."""
    greys = np.arange(6, dtype=np.uint8).reshape(2, 3) * 40
    picture = Image.fromarray(np.kron(greys, np.ones((SIDE, SIDE), np.uint8))).convert("RGB")
    made_plan = plan(2, 3, 7)
    job = EncodeJob(b"d" * 32, made_plan, None, Span(0, made_plan.num_rows), encode(picture))
    run = resolve_run(GEOMETRY, made_plan, None, job.rows)
    units = list(run.units())
    assert len(units) > 1 and sum(unit.grid.t for unit in units) == 7
    prepared = list(Processor(SETTINGS, SETTINGS).prepare(job, units, threading.Event()))
    assert [unit.grid for unit in prepared] == [unit.grid for unit in units]
    patches = np.concatenate([unit.patches for unit in prepared])
    assert patches.shape == (7 * 1024, 3 * 14 * 14)
    tiles = patches.reshape(7, -1)
    means = [float(np.unique(tile)[0]) for tile in tiles[:6]]
    assert means == sorted(means) and len(set(means)) == 6  # row by row, from dark to light
    assert len(np.unique(tiles[6])) > 6 * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grids": (Grid(9, 32, 32),), "num_rows": 9 * 256}, "do not make 9 groups"),
        ({"grids": (Grid(7, 16, 64),)}, "not 16x64"),
        ({"resized_height": 900}, "no tiles"),
    ],
)
def test_plans_that_contradict_themselves(changes: dict[str, object], message: str) -> None:
    wrong = dataclasses.replace(plan(2, 3, 7), **changes)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=message):
        resolve_run(GEOMETRY, wrong, None, Span(0, wrong.num_rows))


def test_a_single_tile_has_no_thumbnail() -> None:
    with pytest.raises(InvalidRequest, match="1 tiles do not make 2 groups"):
        resolve_run(GEOMETRY, plan(1, 1, 2), None, Span(0, 512))
