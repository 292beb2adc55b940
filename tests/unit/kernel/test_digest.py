"""Digests: equal for equal contents however they are stored, different for whatever matters."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from chiasm.checkpoint import WEIGHT_INDEX
from chiasm.digest import (
    language_model_digest,
    processor_digest,
    tokenizer_digest,
    tower_digest,
)

CONFIG = {"vision_config": {"depth": 2}, "hidden_size": 8, "transformers_version": "5"}
LARGE = 1 << 16  # float32 values: 256 KiB, of which 64 KiB are read


def tensors() -> dict[str, np.ndarray]:
    return {
        "visual.block": np.arange(LARGE, dtype=np.float32),
        "visual.norm": np.ones(8, dtype=np.float32),
        "model.layer": np.arange(LARGE, dtype=np.float32),
    }


def save(
    directory: Path,
    weights: dict[str, np.ndarray] | None = None,
    *,
    config: dict[str, object] | None = None,
    num_files: int = 1,
) -> Path:
    directory.mkdir(exist_ok=True)
    weights = weights or tensors()
    (directory / "config.json").write_text(json.dumps(config or CONFIG))
    for number in range(num_files):
        names = list(weights)[number::num_files]
        save_file({name: weights[name] for name in names}, directory / f"{number}.safetensors")
    return directory


def test_files_and_fields_that_mean_nothing_change_nothing(tmp_path: Path) -> None:
    one = save(tmp_path / "one")
    other = save(tmp_path / "other", config={**CONFIG, "transformers_version": "4"}, num_files=3)
    assert tower_digest(one) == tower_digest(other)
    assert language_model_digest(one) == language_model_digest(other)


def test_weights_that_are_there_a_second_time_count_once(tmp_path: Path) -> None:
    one = save(tmp_path / "one")
    both = save(tmp_path / "both", num_files=3)
    weight_map = {name: f"{number}.safetensors" for number, name in enumerate(tensors())}
    (both / WEIGHT_INDEX).write_text(json.dumps({"weight_map": weight_map}))
    save_file(tensors(), both / "consolidated.safetensors")
    assert tower_digest(one) == tower_digest(both)
    assert language_model_digest(one) == language_model_digest(both)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("index", [0, LARGE - 1])
def test_another_value_is_another_tower_and_the_same_language_model(
    tmp_path: Path, full: bool, index: int
) -> None:
    changed = tensors()
    changed["visual.block"][index] += 1
    one, other = save(tmp_path / "one"), save(tmp_path / "other", changed)
    assert tower_digest(one, full=full) != tower_digest(other, full=full)
    assert language_model_digest(one, full=full) == language_model_digest(other, full=full)


def test_only_the_full_digest_sees_every_byte(tmp_path: Path) -> None:
    changed = tensors()
    changed["model.layer"][LARGE // 8] += 1  # between the first and the second piece
    one, other = save(tmp_path / "one"), save(tmp_path / "other", changed)
    assert language_model_digest(one) == language_model_digest(other)
    assert language_model_digest(one, full=True) != language_model_digest(other, full=True)


def test_shape_dtype_name_and_config_matter(tmp_path: Path) -> None:
    digests = {tower_digest(save(tmp_path / "plain"))}
    for number, norm in enumerate((np.ones((2, 4), np.float32), np.ones(8, np.int32))):
        digests.add(tower_digest(save(tmp_path / f"{number}", {**tensors(), "visual.norm": norm})))
    renamed = {name.replace("norm", "norm2"): value for name, value in tensors().items()}
    digests.add(tower_digest(save(tmp_path / "renamed", renamed)))
    deeper = {**CONFIG, "vision_config": {"depth": 3}}
    digests.add(tower_digest(save(tmp_path / "deeper", config=deeper)))
    assert len(digests) == 5


def test_a_checkpoint_without_a_tower_has_no_tower_digest(tmp_path: Path) -> None:
    text = save(tmp_path / "text", {"model.layer": np.ones(8, np.float32)})
    assert tower_digest(text) == b"" != language_model_digest(text)


def test_processor_and_tokenizer_files(tmp_path: Path) -> None:
    bare = processor_digest(tmp_path), tokenizer_digest(tmp_path)
    (tmp_path / "video_preprocessor_config.json").write_text('{"fps": 2, "size": {}}')
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    with_files = processor_digest(tmp_path), tokenizer_digest(tmp_path)
    assert with_files[0] != bare[0] and with_files[1] != bare[1]
    (tmp_path / "video_preprocessor_config.json").write_text('{ "size": {}, "fps": 2 }')
    assert processor_digest(tmp_path) == with_files[0], "only the JSON's meaning counts"
