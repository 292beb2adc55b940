"""Ranks on several GPUs, joined by NCCL, say what one GPU says; a lost group comes back."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from decoder_svc.runner.ranks import RanksExecutor
from tests.checkpoints import DEMO, save_tiny_qwen
from tests.layouts import LaidOut, ask_everything

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def answers(
    model_dir: Path, tp_size: int, pp_size: int, *, kill: int | None = None
) -> dict[str, list[list[int]]]:
    engine = LaidOut(model_dir, tp_size=tp_size, pp_size=pp_size, device="cuda")
    executor = engine.parts.executor
    pids = executor.pids if isinstance(executor, RanksExecutor) else ()

    def at_step(step: int) -> None:
        if kill is not None and step == 12:
            os.kill(pids[kill], signal.SIGKILL)

    try:
        ask_everything(engine)
        engine.run(within_s=120.0, at_step=at_step)
        assert executor.num_losses == (kill is not None)
        return engine.answers()
    finally:
        engine.close()


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (4, 2)])
@pytest.mark.parametrize("model", ["tiny", "demo"])
def test_layouts_over_nccl(tmp_path: Path, model: str, tp_size: int, pp_size: int) -> None:
    if torch.cuda.device_count() < tp_size * pp_size:
        pytest.skip(f"needs {tp_size * pp_size} GPUs")
    model_dir = DEMO if model == "demo" else save_tiny_qwen(tmp_path)
    assert answers(model_dir, tp_size, pp_size) == answers(model_dir, 1, 1)


@pytest.mark.parametrize(("tp_size", "pp_size"), [(2, 1), (1, 2)])
def test_a_rank_killed_under_nccl(tmp_path: Path, tp_size: int, pp_size: int) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    model_dir = save_tiny_qwen(tmp_path)
    expected = answers(model_dir, 1, 1)
    assert answers(model_dir, tp_size, pp_size, kill=1) == expected
