"""The same weights in every way that checkpoints keep them load as the same model."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from decoder_svc.config import read_text_config
from decoder_svc.models.stage import DecoderStage
from decoder_svc.parallel.mesh import ParallelMesh
from decoder_svc.runner.loading import load_stage
from tests.families import save_tiny
from tests.unit.decoder.rig import CPU

Tensors = dict[str, torch.Tensor]
EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")


@pytest.fixture(scope="module", name="moe")
def moe_(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("Qwen3-VL MoE", tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module", name="glm")
def glm_(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("GLM-4.1V", tmp_path_factory.mktemp("glm"))


def as_hubs_have_them(tensors: Tensors) -> Tensors:
    return {
        name: tensor.transpose(1, 2).contiguous() if EXPERTS.fullmatch(name) else tensor
        for name, tensor in tensors.items()
    }


def one_by_one(tensors: Tensors) -> Tensors:
    made: Tensors = {}
    for name, tensor in tensors.items():
        match = EXPERTS.fullmatch(name)
        if match is None:
            made[name] = tensor
            continue
        for expert, own in enumerate(tensor):
            if match[2] == "down_proj":
                made[f"{match[1]}.{expert}.down_proj.weight"] = own.clone()
            else:
                gate, up = own.chunk(2)
                made[f"{match[1]}.{expert}.gate_proj.weight"] = gate.clone()
                made[f"{match[1]}.{expert}.up_proj.weight"] = up.clone()
    return made


def halves_apart(tensors: Tensors) -> Tensors:
    made: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate_up_proj.weight"):
            for part, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
                made[name.replace("gate_up", part)] = half.clone()
        else:
            made[name] = tensor
    return made


def rewritten(source: Path, target: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """A copy with changed tensors, in three files with an index."""
    shutil.copytree(source, target)
    tensors = change(load_file(source / "model.safetensors"))
    (target / "model.safetensors").unlink()
    names = sorted(tensors)
    where = {}
    for shard in range(3):
        file = f"model-{shard + 1:05}-of-00003.safetensors"
        save_file({name: tensors[name] for name in names[shard::3]}, target / file)
        where.update(dict.fromkeys(names[shard::3], file))
    index = target / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return target


def load(path: Path, mesh: ParallelMesh | None = None) -> DecoderStage:
    return load_stage(path, read_text_config(path), mesh or ParallelMesh(), CPU)


def assert_equal(ours: DecoderStage, theirs: DecoderStage) -> None:
    expected = dict(theirs.named_parameters())
    assert expected
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize("change", [as_hubs_have_them, one_by_one])
@pytest.mark.parametrize(("tp_size", "ep_size"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_experts_fused_swapped_or_alone(
    moe: Path, tmp_path: Path, change: Callable[[Tensors], Tensors], tp_size: int, ep_size: int
) -> None:
    other = rewritten(moe, tmp_path / "other", change)
    for rank in range(tp_size):
        mesh = ParallelMesh(tp_rank=rank, tp_size=tp_size, ep_size=ep_size)
        assert_equal(load(other, mesh), load(moe, mesh))


def test_every_rank_holds_another_part_and_none_is_left_out(moe: Path) -> None:
    whole = load(moe).layers[0].mlp.experts
    meshes = [ParallelMesh(tp_rank=rank, tp_size=4, ep_size=2) for rank in range(4)]
    parts = [load(moe, mesh).layers[0].mlp.experts for mesh in meshes]
    down = torch.cat([torch.cat([a.down, b.down], dim=2) for a, b in (parts[:2], parts[2:])])
    assert torch.equal(down, whole.down)


def test_gate_and_up_joined_or_apart(glm: Path, tmp_path: Path) -> None:
    assert_equal(load(rewritten(glm, tmp_path / "apart", halves_apart)), load(glm))


def test_a_missing_expert_and_an_unknown_one_are_named(moe: Path, tmp_path: Path) -> None:
    def without(tensors: Tensors) -> Tensors:
        made = one_by_one(tensors)
        del made["model.language_model.layers.2.mlp.experts.5.up_proj.weight"]
        return made

    def with_more(tensors: Tensors) -> Tensors:
        name = "model.language_model.layers.1.mlp.experts.8.up_proj.weight"
        return {**one_by_one(tensors), name: torch.ones(2, 2)}

    with pytest.raises(ValueError, match=r"lacks 1 .*layers\.2\.mlp\.experts\.5\.up_proj\.weight"):
        load(rewritten(moe, tmp_path / "without", without))
    with pytest.raises(ValueError, match=r"1 unknown .*layers\.1\.mlp\.experts\.8\.up_proj"):
        load(rewritten(moe, tmp_path / "more", with_more))


def test_experts_of_another_width_are_refused(moe: Path, tmp_path: Path) -> None:
    def narrowed(tensors: Tensors) -> Tensors:
        return {
            name: tensor[:, :, :40].contiguous() if name.endswith("experts.down_proj") else tensor
            for name, tensor in tensors.items()
        }

    with pytest.raises(ValueError, match=r"down_proj\.weight is \(64, 40\) in the checkpoint"):
        load(rewritten(moe, tmp_path / "narrow", narrowed))
