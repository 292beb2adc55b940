"""Loading: layouts, tied and untied heads, slices per rank, and errors that name the tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from chiasm import loading_bar
from chiasm.checkpoint import WEIGHT_INDEX
from decoder_svc.config import from_hf, read_text_config
from decoder_svc.layers.embedding import VocabParallelEmbedding
from decoder_svc.layers.linear import ColumnLinear, RowLinear
from decoder_svc.layers.mlp import GatedMLP
from decoder_svc.models.registry import family_of
from decoder_svc.models.weights import CheckpointReader
from decoder_svc.parallel import ParallelMesh, Shard
from decoder_svc.runner.loading import Placement, load_stage
from tests.checkpoints import DEMO, save_tiny_qwen

torch.set_num_threads(1)

CPU = Placement(torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module", name="tiny")
def tiny_(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen(tmp_path_factory.mktemp("tied"))


def rewrite(source: Path, target: Path, change: object) -> Path:
    """A copy of the checkpoint with its tensors put through `change`."""
    tensors = load_file(source / "model.safetensors")
    target.mkdir(exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
    save_file(change(tensors), target / "model.safetensors")  # type: ignore[operator]
    return target


def load(path: Path, mesh: ParallelMesh | None = None) -> torch.nn.Module:
    return load_stage(path, read_text_config(path), mesh or ParallelMesh(), CPU)


def test_both_layouts_give_the_same_model(tiny: Path, tmp_path: Path) -> None:
    moved = rewrite(
        tiny,
        tmp_path,
        lambda tensors: {
            name.replace("model.", "model.language_model.", 1)
            if name.startswith("model.")
            else name: tensor
            for name, tensor in tensors.items()
        },
    )
    ours, theirs = load(tiny).state_dict(), load(moved).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_missing_tensor_is_named(tiny: Path, tmp_path: Path) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    short = rewrite(tiny, tmp_path, lambda t: {k: v for k, v in t.items() if k != name})
    with pytest.raises(ValueError, match=f"lacks 1 tensors: {name}"):
        load(short)


def test_an_unknown_tensor_is_named_but_not_the_towers(tiny: Path, tmp_path: Path) -> None:
    extra = rewrite(
        tiny,
        tmp_path,
        lambda t: {**t, "visual.strange": torch.ones(1), "model.strange": torch.ones(1)},
    )
    with pytest.raises(ValueError, match=r"has 1 unknown tensors: model\.strange"):
        load(extra)


def test_a_tensor_of_another_shape_is_named(tiny: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    wrong = rewrite(tiny, tmp_path, lambda t: {**t, name: torch.ones(65, 64)})
    with pytest.raises(ValueError, match=rf"{name} is \(65, 64\).*\(64, 64\) by the config"):
        load(wrong)


def test_a_tied_checkpoint_may_store_its_head(tiny: Path, tmp_path: Path) -> None:
    stored = rewrite(tiny, tmp_path, lambda t: {**t, "lm_head.weight": torch.zeros(448, 64)})
    model = load(stored)
    assert model.lm_head is model.embedding
    assert model.embedding.weight.abs().sum() > 0


def test_an_untied_checkpoint_needs_its_head(tmp_path: Path) -> None:
    source = save_tiny_qwen(tmp_path / "untied", tied=False)
    model = load(source)
    assert model.lm_head is not model.embedding
    bare = rewrite(
        source,
        tmp_path / "bare",
        lambda t: {k: v for k, v in t.items() if k != "lm_head.weight"},
    )
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        load(bare)


@pytest.mark.parametrize("tied", [True, False])
def test_stages_hold_their_part_only(tmp_path: Path, tied: bool) -> None:
    path = save_tiny_qwen(tmp_path, tied=tied)
    tensors = load_file(path / "model.safetensors")
    stages = [load(path, ParallelMesh(pp_rank=rank, pp_size=4)) for rank in range(4)]
    assert [s.embedding is not None for s in stages] == [True, False, False, False]
    assert [s.lm_head is not None for s in stages] == [False, False, False, True]
    head = tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]
    assert torch.equal(stages[3].lm_head.weight, head)
    for rank, stage in enumerate(stages):
        (layer,) = stage.layers
        stored = tensors[f"model.layers.{rank}.mlp.down_proj.weight"]
        assert torch.equal(layer.mlp.down.weight, stored)


def test_a_bfloat16_checkpoint_is_read_as_the_dtype_asked_for() -> None:
    model = load(DEMO)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("tp_size", [2, 4])
def test_shards_of_linears_and_vocabulary_add_up(tiny: Path, tp_size: int) -> None:
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    name = "model.layers.1"
    meshes = [ParallelMesh(tp_rank=rank, tp_size=tp_size) for rank in range(tp_size)]
    with CheckpointReader(tiny) as reader:
        whole = ColumnLinear(64, (Shard(0, 64, 64),), bias=True)
        whole.load(reader, (f"{name}.self_attn.q_proj",))
        columns = []
        for mesh in meshes:
            part = ColumnLinear(64, (mesh.split(64, unit=16),), bias=True)
            part.load(reader, (f"{name}.self_attn.q_proj",))
            columns.append(part(hidden))
        torch.testing.assert_close(torch.cat(columns, -1), whole(hidden))
        full = RowLinear(Shard(0, 128, 128), 64, ParallelMesh())
        full.load(reader, f"{name}.mlp.down_proj")
        wide = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))
        partial = torch.zeros(5, 64)
        for mesh in meshes:
            shard = mesh.split(128)
            row = RowLinear(shard, 64, ParallelMesh())
            row.load(reader, f"{name}.mlp.down_proj")
            partial += row(wide[:, shard.begin : shard.end])
        torch.testing.assert_close(partial, full(wide))
        table = VocabParallelEmbedding(448, 64, ParallelMesh())
        table.load(reader, "model.embed_tokens")
        rows = []
        for mesh in meshes:
            vocabulary = VocabParallelEmbedding(448, 64, mesh)
            vocabulary.load(reader, "model.embed_tokens")
            rows.append(vocabulary.weight)
        assert torch.equal(torch.cat(rows)[:448], table.weight)


def test_a_padded_shard_is_zero_past_the_end(tiny: Path) -> None:
    mesh = ParallelMesh(tp_rank=4, tp_size=5)
    with CheckpointReader(tiny) as reader:
        part = VocabParallelEmbedding(448, 64, mesh)
        part.load(reader, "model.embed_tokens")
    assert part.weight.shape == (90, 64)
    assert part.weight[:88].abs().sum(dim=1).min() > 0
    assert part.weight[88:].abs().sum() == 0


def test_a_mesh_splits_layers_heads_and_replicates_scarce_kv_heads() -> None:
    ranges = [ParallelMesh(pp_rank=r, pp_size=4).layers(10) for r in range(4)]
    assert ranges == [range(0, 3), range(3, 6), range(6, 8), range(8, 10)]
    meshes = [ParallelMesh(tp_rank=r, tp_size=4) for r in range(4)]
    assert [m.split_kv(2, 16) for m in meshes] == [
        Shard(0, 16, 32),
        Shard(0, 16, 32),
        Shard(16, 32, 32),
        Shard(16, 32, 32),
    ]
    with pytest.raises(ValueError, match="attention heads: 25 cannot be split over --tp-size 4"):
        meshes[0].split(25 * 16, unit=16, what="attention heads")
    with pytest.raises(ValueError, match="3 KV heads"):
        meshes[0].split_kv(3, 16)
    with pytest.raises(ValueError, match="2 layers cannot fill 4"):
        ParallelMesh(pp_size=4).layers(2)
    with pytest.raises(ValueError, match="intermediate_size"):
        GatedMLP(64, 130, meshes[0])


def test_configs_of_both_dialects_say_the_same() -> None:
    nested = json.loads((DEMO / "config.json").read_text())
    flat = {k: v for k, v in nested.items() if k != "text_config"}
    flat = {**nested["text_config"], **flat, "tie_word_embeddings": True}
    assert from_hf(nested, {}) == from_hf(flat, {})
    assert from_hf(nested, {"eos_token_id": [1, 2]}).eos_token_ids == (1, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"rope_scaling": {"type": "yarn", "mrope_section": [4, 6, 6]}}, "'yarn'"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [4, 6]}}, "mrope_section"),
        ({"hidden_size": None}, "hidden_size is missing"),
    ],
)
def test_a_config_this_engine_cannot_serve_is_refused(
    change: dict[str, object], message: str
) -> None:
    config = json.loads((DEMO / "config.json").read_text())
    config["text_config"].update(change)
    with pytest.raises(ValueError, match=message):
        from_hf(config, {})


def test_an_unknown_architecture_lists_the_known() -> None:
    with pytest.raises(ValueError, match="known: .*Qwen2_5_VLForConditionalGeneration"):
        family_of("LlamaForCausalLM")


def test_the_index_says_which_of_two_copies_is_read(tiny: Path, tmp_path: Path) -> None:
    both = rewrite(tiny, tmp_path, lambda tensors: tensors)
    tensors = load_file(both / "model.safetensors")
    (both / "model.safetensors").rename(both / "shard.safetensors")
    save_file(tensors, both / "consolidated.safetensors")
    with pytest.raises(ValueError, match="is there twice"):
        load(both)
    weight_map = dict.fromkeys(tensors, "shard.safetensors")
    (both / WEIGHT_INDEX).write_text(json.dumps({"weight_map": weight_map}))
    ours, theirs = load(tiny).state_dict(), load(both).state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_slow_loading_shows_a_bar_and_quick_loading_none(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load(tiny)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(loading_bar, "QUIET_S", 0.0)
    load(tiny)
    told = capsys.readouterr()
    assert "weights" in told.err and told.out == ""
