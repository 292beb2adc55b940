"""Which batches become graphs; recording itself needs a GPU (tests/gpu)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from chiasm.plan import Grid
from encoder_svc import graphs
from encoder_svc.graphs import GraphedTower

SMALL, LARGE = Grid(1, 4, 4), Grid(1, 40, 40)


class Recorder(GraphedTower):
    """Counts instead of recording."""

    def _capture(self, patches: torch.Tensor, key: tuple[Grid, ...]) -> Any:
        self.recorded = [*getattr(self, "recorded", []), key]
        return None


@pytest.fixture(name="tower")
def tower_(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(graphs, "_REMEMBERED", 2)
    return Recorder(lambda patches, grids: patches, keep=2, max_patches=100)  # type: ignore[arg-type]


def come(tower: Recorder, *grids: Grid, times: int) -> None:
    for _ in range(times):
        tower(torch.zeros(1), list(grids))


def test_batches_that_come_again_and_again(tower: Recorder) -> None:
    come(tower, SMALL, times=3)
    assert not hasattr(tower, "recorded")
    come(tower, SMALL, times=1)
    assert tower.recorded == [(SMALL,)]
    come(tower, LARGE, times=9)
    come(tower, SMALL, SMALL, times=3)
    assert len(tower.recorded) == 1


def test_what_was_long_not_seen_is_forgotten(tower: Recorder) -> None:
    come(tower, SMALL, times=3)
    come(tower, Grid(1, 4, 6), times=1)
    come(tower, Grid(1, 6, 6), times=1)
    come(tower, SMALL, times=1)
    assert not hasattr(tower, "recorded")


def test_after_a_recording_that_failed_no_other_is_tried(
    tower: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def fail(_: torch.Tensor, key: tuple[Grid, ...]) -> Any:
        tries.append(key)
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    monkeypatch.setattr(tower, "_capture", fail)
    patches = torch.ones(3)
    for grid in (SMALL, Grid(1, 4, 6)):
        for _ in range(6):
            assert torch.equal(tower(patches, [grid]), patches)  # as the tower itself answers
    assert tries == [(SMALL,)]
