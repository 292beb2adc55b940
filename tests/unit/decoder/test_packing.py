"""The same weights in every way that checkpoints keep them load as the same model."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from chiasm.kernels.block_scaled import FP8
from decoder_svc.config import from_hf, read_text_config
from decoder_svc.layers.linear import ColumnLinear
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


def load(path: Path, mesh: ParallelMesh | None = None, *, fp8_matmul: bool = False) -> DecoderStage:
    text = read_text_config(path)
    return load_stage(path, text, mesh or ParallelMesh(), CPU, fp8_matmul=fp8_matmul)


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


@pytest.fixture(scope="module", name="internlm")
def internlm_(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("InternVL2.5 (authors')", tmp_path_factory.mktemp("internlm"))


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_queries_keys_and_values_in_one_tensor(internlm: Path, tp_size: int) -> None:
    for rank in range(tp_size):  # of eight ranks, two hold the same KV head
        mesh = ParallelMesh(tp_rank=rank, tp_size=tp_size)
        assert_equal(load(internlm, mesh), load(internlm / "hf", mesh))


def test_a_joint_tensor_of_other_heads_is_refused(internlm: Path, tmp_path: Path) -> None:
    name = "language_model.model.layers.1.attention.wqkv.weight"

    def shorter(tensors: Tensors) -> Tensors:
        return {**tensors, name: tensors[name][:-8].contiguous()}

    with pytest.raises(ValueError, match=r"layers\.1\..*wqkv.* 120 rows .* 128 by the config"):
        load(rewritten(internlm, tmp_path / "shorter", shorter))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"bias": True}, "bias of InternLM2"),
        ({"rope_pos_id_version": "v2pe"}, "rope_pos_id_version 'v2pe'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear'"),
    ],
)
def test_what_internlm2_may_ask_for_in_vain(
    internlm: Path, tmp_path: Path, setting: dict[str, object], message: str
) -> None:
    other = shutil.copytree(internlm, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["llm_config"].update(setting)
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        read_text_config(other)


def test_experts_of_another_width_are_refused(moe: Path, tmp_path: Path) -> None:
    def narrowed(tensors: Tensors) -> Tensors:
        return {
            name: tensor[:, :, :40].contiguous() if name.endswith("experts.down_proj") else tensor
            for name, tensor in tensors.items()
        }

    with pytest.raises(ValueError, match=r"down_proj\.weight is \(64, 40\) in the checkpoint"):
        load(rewritten(moe, tmp_path / "narrow", narrowed))


def in_eight_bits(tensors: Tensors) -> Tensors:
    """Matrices of the layers in float8, with a scale for each block of 128 x 128."""
    made: Tensors = {}
    for name, tensor in tensors.items():
        if ".layers." not in name or tensor.dim() < 2 or ".gate.weight" in name:
            made[name] = tensor
            continue
        rows, columns = tensor.shape[-2:]
        padded = F.pad(tensor, (0, -columns % 128, 0, -rows % 128))
        blocks = padded.unflatten(-2, (-1, 128)).unflatten(-1, (-1, 128))
        scales = blocks.abs().amax((-3, -1)).clamp(min=1e-6) / 448
        spread = scales.repeat_interleave(128, -2).repeat_interleave(128, -1)
        eighths = (tensor / spread[..., :rows, :columns]).to(torch.float8_e4m3fn)
        made[name], made[f"{name}_scale_inv"] = eighths, scales
    return made


def multiplied_out(tensors: Tensors) -> Tensors:
    made = in_eight_bits(tensors)
    for name in [name for name in made if name.endswith("_scale_inv")]:
        scales, stored = made.pop(name), name.removesuffix("_scale_inv")
        rows, columns = made[stored].shape[-2:]
        spread = scales.repeat_interleave(128, -2).repeat_interleave(128, -1)
        made[stored] = made[stored].float() * spread[..., :rows, :columns]
    return made


@pytest.mark.parametrize("name", ["Qwen3-VL", "Qwen3-VL MoE", "GLM-4.1V"])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_blocks_of_eight_bits_are_multiplied_out(tmp_path: Path, name: str, tp_size: int) -> None:
    wide = {"hidden_size": 192, "intermediate_size": 160, "head_dim": 48}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 8, 8]}
    if name == "GLM-4.1V":
        rope |= {"mrope_section": [4, 4, 4], "partial_rotary_factor": 0.5}
    source = save_tiny(name, tmp_path / "source", rope_parameters=rope, **wide)
    stored = rewritten(source, tmp_path / "stored", in_eight_bits)
    plain = rewritten(source, tmp_path / "plain", multiplied_out)
    for rank in range(tp_size):
        mesh = ParallelMesh(tp_rank=rank, tp_size=tp_size)
        assert_equal(load(stored, mesh), load(plain, mesh))


@pytest.mark.parametrize("name", ["Qwen3-VL", "GLM-4.1V", "GLM-4.5V"])
@torch.inference_mode()
def test_blocks_of_eight_bits_stay_where_they_can_be_used(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
    wide |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [12, 10, 10]}
    if name != "Qwen3-VL":
        rope |= {"mrope_section": [6, 5, 5], "partial_rotary_factor": 0.5}
    source = save_tiny(name, tmp_path / "source", rope_parameters=rope, **wide)
    stored = rewritten(source, tmp_path / "stored", in_eight_bits)
    config = json.loads((stored / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (stored / "config.json").write_text(json.dumps(config))
    elsewhere = load(stored, fp8_matmul=True)
    monkeypatch.setattr("decoder_svc.runner.loading.eight_bits_run", lambda placement: True)
    unasked = load(stored)
    for tp_size in (1, 2):
        mesh = ParallelMesh(tp_size=tp_size)
        model = load(stored, mesh, fp8_matmul=True)
        whole = load(plain_of(stored, tmp_path / f"p{tp_size}"), mesh)
        small = [n for n, p in model.named_parameters() if p.dtype is FP8]
        # One head is no whole block.
        assert any("attention.qkv" in n for n in small) is (tp_size == 1)
        assert any("gate_up" in n for n in small)
        hidden = torch.randn(9, 128)
        for ours, theirs in zip(model.modules(), whole.modules(), strict=True):
            if isinstance(ours, ColumnLinear):
                got, wanted = ours(hidden), theirs(hidden)
                assert F.cosine_similarity(got, wanted).min() > 0.998
    for plain in (elsewhere, unasked):
        assert all(p.dtype is torch.float32 for p in plain.parameters())


def plain_of(stored: Path, target: Path) -> Path:
    """The same checkpoint multiplied out."""
    shutil.copytree(stored, target)
    config = json.loads((target / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize(
    ("kept", "stay"),
    [
        ([], True),
        (["model.visual.blocks.0.attn.proj", "lm_head", "model.layers.3.mlp.gate"], True),
        (["model.language_model.layers.0.self_attn.q_proj"], False),
    ],
)
def test_some_matrices_with_all_their_bits_have_all_multiplied_out(
    moe: Path, kept: list[str], stay: bool
) -> None:
    config = json.loads((moe / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": kept,
    }
    assert from_hf(config, {"eos_token_id": 1}).eight_bits is stay


def test_other_quantizations_are_refused(moe: Path, tmp_path: Path) -> None:
    other = shutil.copytree(moe, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="'awq'"):
        read_text_config(other)
