"""Every family's pixels against its reference processor on Pillow, to the last bits of float32."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from chiasm.plan import Modality, Span
from encoder_svc.geometry import resolve_run
from encoder_svc.messages import EncodeJob
from encoder_svc.pixels.settings import read_settings
from encoder_svc.processor import Processor
from encoder_svc.runner import TowerRunner
from gateway.media import MediaHeader
from gateway.messages import MediaOptions
from gateway.planning.registry import planner_for
from tests.families import FAMILIES, save_tiny
from tests.integration.media import encode

from transformers.models.glm4v.image_processing_pil_glm4v import (  # isort: skip
    Glm4vImageProcessorPil,
)
from transformers.models.glm46v.image_processing_pil_glm46v import (  # isort: skip
    Glm46VImageProcessorPil,
)
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (  # isort: skip
    GotOcr2ImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (  # isort: skip
    Qwen2VLImageProcessorPil,
)

NAMES = (
    "Qwen2.5-VL",
    "Qwen3-VL",
    "GLM-4.1V",
    "GLM-4.6V-Flash",
    "InternVL3",
    "InternVL3 (authors')",
)
PROCESSORS: dict[str, Any] = {
    "Qwen2VLImageProcessor": Qwen2VLImageProcessorPil,
    "Glm4vImageProcessor": Glm4vImageProcessorPil,
    "Glm46VImageProcessor": Glm46VImageProcessorPil,
    "GotOcr2ImageProcessor": GotOcr2ImageProcessorPil,
}
SIZES = [(64, 64), (300, 120), (97, 411), (33, 500)]


@pytest.mark.parametrize("name", NAMES)
def test_patches_equal_the_reference(name: str, tmp_path: Path) -> None:
    path = save_tiny(name, tmp_path / "tiny")
    tower = TowerRunner.load(path, device="cpu", dtype="float32", row_dtype="auto")
    processor = Processor(*read_settings(path, tower.geometry))
    settings = dict(FAMILIES[name].image)
    reference = PROCESSORS[settings.pop("image_processor_type")](**settings)
    noise = np.random.default_rng(1)
    for height, width in SIZES:
        drawn = Image.fromarray(noise.integers(0, 256, (height, width, 3), dtype=np.uint8))
        ours = patches_of(processor, path, drawn)
        theirs = reference(drawn, return_tensors="pt")["pixel_values"]
        if FAMILIES[name].tiled:
            ours = to_tiles(ours, tower)
        assert ours.shape == theirs.shape, (height, width)
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def patches_of(processor: Processor, path: Path, drawn: Image.Image) -> torch.Tensor:
    header = MediaHeader(Modality.IMAGE, "image/png", drawn.height, drawn.width)
    layout = planner_for(path).plan(header, MediaOptions(), param="p")
    plan = layout.to_plan(media_bytes=1)
    job = EncodeJob(b"d" * 32, plan, None, Span(0, plan.num_rows), encode(drawn))
    run = resolve_run(processor.geometry, plan, None, job.rows)
    made = processor.prepare(job, run.units(), threading.Event())
    return torch.cat([torch.from_numpy(unit.patches) for unit in made])


def to_tiles(patches: torch.Tensor, tower: TowerRunner) -> torch.Tensor:
    geometry = tower.geometry
    cells, m, p = geometry.tile // geometry.merge, geometry.merge, geometry.patch
    split = patches.view(-1, cells, cells, m, m, 3, p, p).permute(0, 5, 1, 3, 6, 2, 4, 7)
    side = geometry.tile * p
    return split.reshape(-1, 3, side, side)
