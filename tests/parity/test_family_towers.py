"""Rows of every family's tower against transformers, all levels of them, given the same pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from chiasm.plan import Grid
from encoder_svc.runner import TowerRunner
from encoder_svc.work import PreparedUnit
from tests.families import FAMILIES, save_tiny

from transformers import AutoModelForImageTextToText  # isort: skip

torch.set_num_threads(1)

BATCHES = {
    "one cell": [Grid(1, 2, 2)],
    "thin": [Grid(1, 2, 60), Grid(1, 60, 2)],
    "pictures of several sizes": [Grid(1, 4, 6), Grid(1, 10, 8), Grid(1, 16, 16), Grid(1, 36, 50)],
    "a clip between pictures": [Grid(1, 6, 6), Grid(3, 6, 10), Grid(1, 10, 4)],
}


UNTILED = [name for name, family in FAMILIES.items() if not family.tiled]


@pytest.fixture(scope="module", params=UNTILED, name="pair")
def pair_(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, TowerRunner]:
    path: Path = save_tiny(request.param, tmp_path_factory.mktemp("tiny"))
    reference = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    return reference, TowerRunner.load(path, device="cpu", dtype="float32", row_dtype="auto")


def expected_rows(reference: Any, patches: torch.Tensor, grids: list[Grid]) -> torch.Tensor:
    """[rows, levels x hidden]."""
    shapes = torch.tensor([[1, grid.h, grid.w] for grid in grids for _ in range(grid.t)])
    found = reference.model.get_image_features(patches, shapes)
    levels = [torch.cat(found.pooler_output)]
    levels += [torch.cat(level) for level in getattr(found, "deepstack_features", None) or ()]
    return torch.cat(levels, dim=-1)


@pytest.mark.parametrize("name", BATCHES)
@torch.inference_mode()
def test_rows_equal_the_reference(pair: tuple[Any, TowerRunner], name: str) -> None:
    reference, runner = pair
    grids = BATCHES[name]
    torch.manual_seed(2)
    values = runner.geometry.patch_values
    parts = [torch.randn(grid.patches, values) for grid in grids]
    units = [PreparedUnit(part.numpy(), grid) for part, grid in zip(parts, grids, strict=True)]
    rows = torch.cat([rows_of(outcome, runner) for outcome in runner.run(units, segment_rows=64)])
    expected = expected_rows(reference, torch.cat(parts), grids)
    assert rows.shape == expected.shape
    torch.testing.assert_close(rows, expected, atol=2e-5, rtol=1e-5)


def rows_of(outcome: Any, runner: TowerRunner) -> torch.Tensor:
    width = runner.row_format.hidden_size * runner.row_format.levels
    parts = [
        torch.frombuffer(bytearray(buffer.read(0, buffer.num_rows)), dtype=torch.float32)
        for buffer in outcome
    ]
    return torch.cat(parts).view(-1, width)
