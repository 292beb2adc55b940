"""The model split over ranks computes what the whole one does: stages, and shards over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from decoder_svc.config import read_text_config
from decoder_svc.kv_cache.pool import page_bytes
from decoder_svc.parallel import ParallelMesh
from tests.checkpoints import save_tiny_qwen
from tests.unit.decoder.ranks import run_rank, run_stage

torch.set_num_threads(1)


@pytest.mark.parametrize("tied", [True, False])
def test_stages_in_a_row_equal_the_whole(tmp_path: Path, tied: bool) -> None:
    model_dir = save_tiny_qwen(tmp_path, tied=tied)
    whole = run_stage(model_dir, ParallelMesh(), None)
    hidden = None
    for rank in range(3):
        hidden = run_stage(model_dir, ParallelMesh(pp_rank=rank, pp_size=3), hidden)
    assert hidden is not None
    torch.testing.assert_close(hidden, whole, rtol=0, atol=1e-5)


def test_shards_over_gloo_equal_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A tied model of two KV heads, and an untied one whose single KV head is replicated.
    model_dirs = [
        save_tiny_qwen(tmp_path / "tied", tied=True, kv_heads=2),
        save_tiny_qwen(tmp_path / "untied", tied=False, kv_heads=1),
    ]
    target = str(tmp_path / "logits.pt")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    arguments = (2, model_dirs, f"file://{tmp_path / 'rendezvous'}", target)
    mp.spawn(run_rank, arguments, nprocs=2)
    for model_dir, logits in zip(model_dirs, torch.load(target), strict=True):
        whole = run_stage(model_dir, ParallelMesh(), None)
        torch.testing.assert_close(logits, whole, rtol=0, atol=1e-4)


def test_a_rank_needs_its_share_of_a_page_only(tmp_path: Path) -> None:
    text = read_text_config(save_tiny_qwen(tmp_path))
    sizes = {
        mesh: page_bytes(text, mesh, block_size=16, dtype=torch.bfloat16)
        for mesh in (
            ParallelMesh(),
            ParallelMesh(tp_size=2),
            ParallelMesh(pp_size=4),
            ParallelMesh(tp_size=4),
        )
    }
    # K and V, layers, tokens, features of KV heads, bytes
    assert list(sizes.values()) == [
        2 * 4 * 16 * 32 * 2,
        2 * 4 * 16 * 16 * 2,
        2 * 1 * 16 * 32 * 2,
        2 * 4 * 16 * 16 * 2,
    ]
