"""Our Qwen2.5-VL tower gives the reference's rows, given the same pixels, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from chiasm.plan import Grid
from encoder_svc.layers.windows import window_order
from encoder_svc.models.qwen2_5_vl import Qwen25VisionTower, VisionConfig
from encoder_svc.runner import NON_FINITE, TowerRunner
from encoder_svc.weights import load_tower
from encoder_svc.work import PreparedUnit, RunFailure
from tests import checkpoints

torch.set_num_threads(1)
from transformers import (  # noqa: E402
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (  # noqa: E402
    Qwen2_5_VisionTransformerPretrainedModel as Reference,
)

SHAPE: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 48,
    "fullatt_block_indexes": [1, 3],
    "patch_size": 14,
    "window_size": 56,
}
BATCHES = {
    "28x28 grown to 56x56": [Grid(1, 4, 4)],
    "one window and no more": [Grid(1, 8, 8)],
    "partial windows on both edges": [Grid(1, 14, 22)],
    "thin": [Grid(1, 2, 60), Grid(1, 60, 2)],
    "1000x2530": [Grid(1, 36, 90)],
    "pictures of several sizes": [Grid(1, 4, 6), Grid(1, 10, 8), Grid(1, 2, 2), Grid(1, 16, 16)],
    "a clip": [Grid(5, 6, 10)],
    "a clip between pictures": [Grid(1, 6, 6), Grid(3, 6, 10), Grid(1, 10, 4)],
}


def make_pair(**changes: Any) -> tuple[Reference, Qwen25VisionTower]:
    config = Qwen2_5_VLConfig(vision_config={**SHAPE, **changes}).vision_config
    torch.manual_seed(1)
    reference = Reference(config).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.12)
            else:
                parameter.normal_(mean=0.5, std=0.3)  # biases and norms that are seen
    tower = Qwen25VisionTower(VisionConfig.from_hf(config.to_dict())).eval()
    state = {
        name: value.flatten(1) if value.dim() == 5 else value
        for name, value in reference.state_dict().items()
    }
    tower.load_state_dict(state)
    tower.finish()
    return reference, tower


@pytest.fixture(scope="module")
def pair() -> tuple[Reference, Qwen25VisionTower]:
    return make_pair()


def pixels(grids: Sequence[Grid], values: int = 1176) -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randn(sum(grid.patches for grid in grids), values)


def expected_rows(
    reference: Reference, patches: torch.Tensor, grids: Sequence[Grid]
) -> torch.Tensor:
    return reference(patches, torch.tensor([[g.t, g.h, g.w] for g in grids])).pooler_output


@pytest.mark.parametrize("name", BATCHES)
@torch.inference_mode()
def test_rows_equal_the_reference(pair: tuple[Reference, Qwen25VisionTower], name: str) -> None:
    reference, tower = pair
    grids = BATCHES[name]
    patches = pixels(grids)
    rows = tower(patches, grids)
    expected = expected_rows(reference, patches, grids)
    assert rows.shape == expected.shape
    torch.testing.assert_close(rows, expected, atol=2e-5, rtol=1e-5)
    assert torch.cosine_similarity(rows, expected).min() >= 0.9999


@torch.inference_mode()
def test_other_shapes_of_tower() -> None:
    changes = {"window_size": 112, "fullatt_block_indexes": ["0", "2"], "temporal_patch_size": 1}
    numbers = {**changes, "fullatt_block_indexes": [0, 2]}
    reference, tower = make_pair(**numbers)
    strings = VisionConfig.from_hf({**reference.config.to_dict(), **changes})
    assert strings == tower.config and strings.full_blocks == {0, 2}
    grids = [Grid(1, 18, 26), Grid(2, 4, 4)]
    patches = pixels(grids, 588)
    torch.testing.assert_close(
        tower(patches, grids), expected_rows(reference, patches, grids), atol=2e-5, rtol=1e-5
    )


@torch.inference_mode()
def test_items_of_a_batch_do_not_mix(pair: tuple[Reference, Qwen25VisionTower]) -> None:
    """What an item gets does not depend on its neighbours, whatever those hold."""
    _, tower = pair
    grids = [Grid(1, 6, 6), Grid(3, 6, 10), Grid(1, 10, 4), Grid(1, 16, 16)]
    patches = pixels(grids)
    rows = tower(patches, grids).split([grid.patches // 4 for grid in grids])
    for index, (grid, part) in enumerate(
        zip(grids, patches.split([grid.patches for grid in grids]), strict=True)
    ):
        torch.testing.assert_close(tower(part, [grid]), rows[index], atol=1e-6, rtol=0)


@torch.inference_mode()
def test_runs_of_a_clip_equal_the_whole(pair: tuple[Reference, Qwen25VisionTower]) -> None:
    _, tower = pair
    whole = Grid(6, 6, 10)
    patches = pixels([whole])
    rows = tower(patches, [whole])
    for begin, end in ((0, 1), (1, 4), (4, 6)):
        run = tower(patches[begin * 60 : end * 60], [Grid(end - begin, 6, 10)])
        torch.testing.assert_close(run, rows[begin * 15 : end * 15], atol=1e-6, rtol=0)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (4, 4), (5, 9), (1, 7), (18, 45)])
def test_windows_partition_a_frame(height: int, width: int) -> None:
    order, lengths = window_order(height, width, 4)
    assert sorted(order.tolist()) == list(range(height * width))
    assert sum(lengths) == height * width and min(lengths) > 0
    first = 0
    for length in lengths:
        cells = order[first : first + length]
        first += length
        assert len({(int(c) // width // 4, int(c) % width // 4) for c in cells}) == 1


@torch.inference_mode()
def test_hub_files_load(tmp_path: Path) -> None:
    """The hub's names and its five-dimensional patch kernel, through the loader and the runner."""
    directory = checkpoints.save_tiny_qwen(tmp_path / "tiny", seed=3)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
    runner = TowerRunner.load(directory, device="cpu", dtype="float32", row_dtype="auto")
    grid = Grid(1, 6, 8)
    patches = pixels([grid])
    ((buffer,),) = runner.run([PreparedUnit(patches.numpy(), grid)], segment_rows=100)
    rows = torch.frombuffer(buffer.read(0, 12), dtype=torch.float32).view(12, 64)
    expected = expected_rows(model.model.visual, patches, [grid])
    torch.testing.assert_close(rows, expected, atol=2e-5, rtol=1e-5)


def test_other_prefix_and_wrong_tensors(tmp_path: Path) -> None:
    directory = checkpoints.save_tiny_qwen(tmp_path / "tiny")
    file = directory / "model.safetensors"
    tensors = {k: v for k, v in load_file(file).items() if k.startswith("visual.")}

    def load(changed: dict[str, torch.Tensor]) -> Qwen25VisionTower:
        save_file(changed, file)
        return load_tower(directory, device=torch.device("cpu"), dtype=torch.bfloat16)

    renamed = load({f"model.{name}": value for name, value in tensors.items()})
    assert all(p.dtype is torch.bfloat16 for p in renamed.parameters())
    with pytest.raises(ValueError, match=r"lacks tensors.*: blocks\.2\.norm1\.weight$"):
        load({k: v for k, v in tensors.items() if k != "visual.blocks.2.norm1.weight"})
    with pytest.raises(ValueError, match=r"unknown tensors.*: blocks\.9\.norm1\.weight$"):
        load({**tensors, "visual.blocks.9.norm1.weight": torch.ones(32)})
    with pytest.raises(ValueError, match=r"merger\.ln_q\.weight has shape \(31,\)"):
        load({**tensors, "visual.merger.ln_q.weight": torch.ones(31)})


@torch.inference_mode()
def test_float16_survives_what_overflows(tmp_path: Path) -> None:
    """A product of gate and up beyond 65504 in a late block, at every size of picture."""
    directory = checkpoints.save_tiny_qwen(tmp_path / "tiny")
    tensors = load_file(directory / "model.safetensors")
    for name, factor in (("gate_proj", 600.0), ("up_proj", 600.0), ("down_proj", 1 / 360_000)):
        tensors[f"visual.blocks.3.mlp.{name}.weight"].mul_(factor)
    save_file(tensors, directory / "model.safetensors")
    device = torch.device("cpu")
    wide = load_tower(directory, device=device, dtype=torch.float32)
    half = load_tower(directory, device=device, dtype=torch.float16)
    naive = load_tower(directory, device=device, dtype=torch.float32).half()
    for height, width in ((2, 2), (14, 22), (2, 40), (36, 74)):
        grids = [Grid(1, height, width)]
        patches = pixels(grids)
        rows = half(patches, grids)
        assert rows.dtype is torch.float16 and rows.isfinite().all()
        assert torch.cosine_similarity(rows.float(), wide(patches, grids)).min() >= 0.999
        assert not naive(patches, grids).isfinite().all(), "the case overflows nothing"


def test_non_finite_rows_fail_their_unit_alone(tmp_path: Path) -> None:
    directory = checkpoints.save_tiny_qwen(tmp_path / "tiny")
    runner = TowerRunner.load(directory, device="cpu", dtype="float32", row_dtype="bfloat16")
    grid = Grid(1, 4, 6)
    good, bad = pixels([grid]).numpy(), pixels([grid]).numpy()
    bad[3, 7] = np.inf
    alone = runner.run([PreparedUnit(good, grid)], segment_rows=4)
    batch = runner.run([PreparedUnit(p, grid) for p in (good, bad, good)], segment_rows=4)
    assert batch[1] == RunFailure(NON_FINITE)
    for outcome in (alone[0], batch[0], batch[2]):
        assert isinstance(outcome, tuple)
        assert [buffer.num_rows for buffer in outcome] == [4, 2]
        assert [buffer.nbytes for buffer in outcome] == [4 * 128, 2 * 128]
        assert bytes(outcome[1].read(1, 2)) == bytes(alone[0][1].read(1, 2))
