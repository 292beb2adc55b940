"""Sizes, layouts and the break-even estimate of a checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from safetensors.torch import load_file

from chiasm.cli.model_facts import Facts, Traffic, describe, split_estimate
from chiasm.digest import is_tower_tensor
from tests.families import FAMILIES, save_tiny

EIGHT = Facts(
    family="qwen3_vl",
    tower_bytes=1_150_000_000,
    tower_parameters=575_000_000,
    text_bytes=16_400_000_000,
    text_parameters=8_200_000_000,
    active_parameters=8_200_000_000,
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
    lines = dict(describe(path, Traffic()))
    assert lines["family"] == facts.family
    assert "tp 2 x pp 1" in lines["layouts on 141 GB GPUs"]


def test_layouts_follow_heads_widths_and_layers() -> None:
    assert all(EIGHT.divides(tp, pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4))
    assert not EIGHT.divides(3, 1)
    assert not dataclasses.replace(EIGHT, widths=(12290,)).divides(4, 1)
    assert dataclasses.replace(EIGHT, kv_heads=2).divides(8, 1)  # each on four ranks
    assert not dataclasses.replace(EIGHT, layers=10).divides(1, 4)  # two layers, three levels


def test_kv_heads_that_are_replicated_take_their_room() -> None:
    two = dataclasses.replace(EIGHT, kv_heads=2)
    assert two.token_bytes(8, 1) == two.token_bytes(2, 1) == 4 * 128 * 36
    assert EIGHT.token_bytes(1, 1) == 4 * 8 * 128 * 36
    assert EIGHT.rank_gb(2, 2) == pytest.approx(4.1 + 2)


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
