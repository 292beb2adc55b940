"""Sizes, layouts and the break-even estimate of a checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from chiasm.cli.model_facts import Facts, Ranks, Traffic, describe, split_estimate
from chiasm.digest import is_tower_tensor
from decoder_svc.config import read_text_config
from decoder_svc.models.stage import DecoderStage
from decoder_svc.parallel.mesh import ParallelMesh
from tests.families import FAMILIES, save_tiny

EIGHT = Facts(
    family="qwen3_vl",
    tower_bytes=1_150_000_000,
    tower_parameters=575_000_000,
    text_bytes=16_400_000_000,
    text_parameters=8_200_000_000,
    active_parameters=8_200_000_000,
    vocabulary_bytes=1_240_000_000,
    tied=False,
    heads=32,
    kv_heads=8,
    head_dim=128,
    layers=36,
    widths=(12288,),
    deepstack=3,
    merge=2,
)


@pytest.mark.parametrize("name", FAMILIES)
def test_sizes_are_those_of_the_tensors(name: str, tmp_path: Path) -> None:
    path = save_tiny(name, tmp_path / "tiny")
    tensors = load_file(path / "model.safetensors")
    tower = sum(t.numel() for n, t in tensors.items() if is_tower_tensor(n))
    text = sum(t.numel() for n, t in tensors.items() if not is_tower_tensor(n))
    facts = Facts.of(path)
    assert (facts.tower_parameters, facts.text_parameters) == (tower, text)
    assert facts.tower_bytes == 4 * tower and facts.text_bytes == 4 * text
    experts = sum(t.numel() for n, t in tensors.items() if ".experts." in n)
    assert bool(experts) == FAMILIES[name].moe
    assert facts.active_parameters == text - experts * 6 // 8  # two of eight are used
    lines = dict(describe(path, Traffic(), Ranks()))
    assert lines["family"] == facts.family
    assert "tp 2 x pp 1" in lines["layouts on 141 GB GPUs"]


def test_layouts_follow_heads_widths_and_layers() -> None:
    assert not any(EIGHT.obstacle(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4))
    assert "do not divide by 3" in EIGHT.obstacle(3, 1)
    assert "width of 12290" in dataclasses.replace(EIGHT, widths=(12290,)).obstacle(4, 1)
    assert not dataclasses.replace(EIGHT, kv_heads=2).obstacle(8, 1)  # each on four ranks
    assert "2 of 3 layers" in dataclasses.replace(EIGHT, layers=8).obstacle(1, 4)
    assert "do not fill 4 stages" in dataclasses.replace(EIGHT, layers=3).obstacle(1, 4)


def test_kv_heads_that_are_replicated_take_their_room() -> None:
    two = dataclasses.replace(EIGHT, kv_heads=2)
    assert two.token_bytes(8, 1) == two.token_bytes(2, 1) == 4 * 128 * 36
    assert EIGHT.token_bytes(1, 1) == 4 * 8 * 128 * 36
    assert EIGHT.rank_gb(2, 1) == pytest.approx(8.2 + 2)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_memory_of_the_largest_rank_is_what_the_decoder_builds(
    name: str, tied: bool, tmp_path: Path
) -> None:
    if tied and FAMILIES[name].native:
        pytest.skip("the authors' layout is never tied")
    path = save_tiny(name, tmp_path / "tiny", tied=tied, num_hidden_layers=12)
    facts, config = Facts.of(path), read_text_config(path)
    for tp_size, pp_size in ((1, 1), (2, 1), (1, 2), (2, 4)):
        built = []
        for stage in range(pp_size):
            mesh = ParallelMesh(tp_size=tp_size, pp_size=pp_size, pp_rank=stage)
            with torch.device("meta"):
                part = DecoderStage(config, mesh)
            built.append(4 * sum({id(p): p.numel() for p in part.parameters()}.values()))
        assert facts.rank_gb(tp_size, pp_size) - 2.0 == pytest.approx(max(built) / 1e9, rel=0.1)


def test_the_layout_asked_for_is_told_or_why_it_cannot_be(tmp_path: Path) -> None:
    path = save_tiny("Qwen3-VL", tmp_path / "tiny")
    lines = dict(describe(path, Traffic(), Ranks(2, 1)))
    assert "GB a rank" in lines["tp 2 x pp 1"]
    assert "cannot be: 4 heads" in dict(describe(path, Traffic(), Ranks(3, 1)))["tp 3 x pp 1"]
    assert "of 3 layers" in dict(describe(path, Traffic(), Ranks(1, 4)))["tp 1 x pp 4"]
    small = dict(describe(path, Traffic(gpu_gb=2.0), Ranks()))
    assert (
        "more than a GPU" in small["tp 1 x pp 1"] and small["layouts on 2 GB GPUs"] == "none fits"
    )


def test_more_pictures_take_more_encoders() -> None:
    counts = [
        split_estimate(EIGHT, Traffic(picture_rows=rows)).encoders
        for rows in (64, 1024, 8192, 65536)
    ]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] > 1


def test_splitting_evenly_costs_nothing() -> None:
    """Where the share of pictures is a whole number of GPUs, both ways serve as many requests."""
    for traffic in (Traffic(gpus=gpus) for gpus in (2, 8, 64, 1024)):
        split = split_estimate(EIGHT, traffic)
        assert 0 < split.throughput <= 1 + 1e-9
    assert split_estimate(EIGHT, Traffic(gpus=1024)).throughput > 0.99
    assert split_estimate(EIGHT, Traffic(gpus=1)).encoders == 0
