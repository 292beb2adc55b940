"""Every architecture on a GPU, in float32, answers what it answers on a CPU; rows are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from decoder_svc.layers import moe
from encoder_svc.runner import TowerRunner
from encoder_svc.work import PreparedUnit
from tests.families import FAMILIES, save_tiny
from tests.layouts import LaidOut
from tests.parity.harness import Prepared, Served, request
from tests.parity.test_families import PROMPTS
from tests.parity.test_family_towers import rows_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def answers(path: Path, made: dict[str, Prepared], device: str) -> dict[str, list[list[int]]]:
    engine = LaidOut(path, device=device)
    try:
        for key, one in made.items():
            engine.put(request(engine, key, one, max_tokens=24))
        engine.run(within_s=120.0)
        return engine.answers()
    finally:
        engine.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_and_rows_of_cpu_and_gpu(name: str, tmp_path: Path) -> None:
    path = save_tiny(name, tmp_path / "tiny")
    served = Served(name, path)
    made = {key: served.prepare(media) for key, media in PROMPTS.items()}
    assert answers(path, made, "cuda") == answers(path, made, "cpu")
    on_gpu = TowerRunner.load(path, device="cuda", dtype="float32", row_dtype="auto")
    for one in made.values():
        for plan, rows, patches in zip(one.plans, one.rows, one.patches, strict=True):
            unit = PreparedUnit(patches.numpy(), plan.grids[0])
            (outcome,) = on_gpu.run([unit], segment_rows=10**6)
            torch.testing.assert_close(rows_of(outcome, on_gpu), rows, atol=2e-3, rtol=2e-3)


@torch.inference_mode()
def test_grouped_products_on_a_gpu() -> None:
    torch.manual_seed(0)
    kind = {"dtype": torch.bfloat16, "device": "cuda"}
    tokens = torch.randn(300, 256, **kind)
    gate_up, down = torch.randn(16, 2 * 64, 256, **kind) / 16, torch.randn(16, 256, 64, **kind) / 8
    ends = torch.arange(20, 20 * 17, 20, dtype=torch.int32, device="cuda").clamp(max=280)
    grouped = moe._grouped(tokens, gate_up, down, ends)[:280].float()
    plain = moe._one_by_one(tokens.float(), gate_up.float(), down.float(), ends)[:280]
    assert torch.cosine_similarity(grouped, plain).min() > 0.999
