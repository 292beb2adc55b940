"""Names of models: what they stand for, how a wrong one is refused; and their JSON files."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from chiasm.checkpoint import (
    WEIGHT_INDEX,
    Wanted,
    every_tensor,
    no_tensor,
    read_json,
    resolve_model,
    weight_files,
)
from chiasm.demo import checkpoint_dir
from chiasm.digest import is_tower_tensor


def test_demo_is_the_shipped_checkpoint() -> None:
    assert resolve_model("demo") == checkpoint_dir()
    assert (resolve_model("demo") / "model.safetensors").is_file()


def test_a_directory_is_itself_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("m", "./m", "~/m", str(tmp_path / "m")):
        assert resolve_model(name) == tmp_path / "m"


class Hub:
    """A repository of files, and the cache that downloads land in."""

    def __init__(self, cache: Path, files: dict[str, str]) -> None:
        self.cache = cache
        self.files = files
        self.fetched: list[str] = []

    def snapshot_download(
        self, repo_id: str, *, allow_patterns: list[str], local_files_only: bool = False
    ) -> str:
        assert repo_id == "some-org/some-model-7B"
        if local_files_only:
            if not self.cache.exists():
                raise LocalEntryNotFoundError("not there")
            return str(self.cache)
        self.cache.mkdir(exist_ok=True)
        for name, text in self.files.items():
            path = self.cache / name
            if any(fnmatch(name, pattern) for pattern in allow_patterns) and not path.exists():
                path.write_text(text)
                self.fetched.append(name)
        return str(self.cache)


SHARDS = {
    "visual.blocks.0.norm1.weight": "1.safetensors",
    "visual.merger.ln_q.weight": "2.safetensors",
    "model.layers.0.mlp.up_proj.weight": "2.safetensors",
    "lm_head.weight": "3.safetensors",
}
PLAIN = {"config.json": "{}", "tokenizer.json": "{}", "chat_template.jinja": ""}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    shards = dict.fromkeys(SHARDS.values(), "weights")
    index = {WEIGHT_INDEX: json.dumps({"weight_map": SHARDS})}
    pickles = {"pytorch_model.bin": "pickled", "model.pt": "pickled"}
    made = Hub(tmp_path / "cache", PLAIN | index | shards | pickles)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot_download)
    return made


@pytest.mark.parametrize(
    ("wanted", "shards"),
    [
        (no_tensor, []),
        (is_tower_tensor, ["1.safetensors", "2.safetensors"]),
        (every_tensor, ["1.safetensors", "2.safetensors", "3.safetensors"]),
    ],
)
def test_each_service_downloads_what_it_reads(hub: Hub, wanted: Wanted, shards: list[str]) -> None:
    assert resolve_model("some-org/some-model-7B", wanted=wanted) == hub.cache
    assert sorted(hub.fetched) == sorted([*PLAIN, WEIGHT_INDEX, *shards])
    hub.fetched.clear()
    hub.files.clear()
    assert resolve_model("some-org/some-model-7B", wanted=wanted) == hub.cache, "no network needed"
    assert not hub.fetched


def test_a_part_that_another_service_has_fetched_is_completed(hub: Hub) -> None:
    resolve_model("some-org/some-model-7B", wanted=no_tensor)
    hub.fetched.clear()
    resolve_model("some-org/some-model-7B", wanted=is_tower_tensor)
    assert sorted(hub.fetched) == ["1.safetensors", "2.safetensors"]
    resolve_model("some-org/some-model-7B")
    assert hub.fetched[2:] == ["3.safetensors"]


def test_weights_in_one_file_are_fetched_whole_or_not_at_all(hub: Hub) -> None:
    hub.files = PLAIN | {"model.safetensors": "weights"}
    resolve_model("some-org/some-model-7B", wanted=no_tensor)
    assert "model.safetensors" not in hub.fetched
    resolve_model("some-org/some-model-7B", wanted=is_tower_tensor)
    assert "model.safetensors" in hub.fetched


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/place", "no such directory, and no hub id"),
        ("two words", "no such directory, and no hub id"),
        ("", "no such directory, and no hub id"),
        ("a/b/c", "no such directory, and no hub id"),
        ("../../etc/passwd", "no such directory, and no hub id"),
        ("some-org/not-cached", "cannot be downloaded"),
    ],
)
def test_other_names_are_refused_in_one_line(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        resolve_model(name)
    assert repr(name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        resolve_model(str(tmp_path))


def test_a_json_file_is_an_object_or_an_error(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(ValueError, match=r"has no config\.json"):
        read_json(path)
    assert read_json(path, optional=True) == {}
    path.write_text('{"a": 1}')
    assert read_json(path) == read_json(path, optional=True) == {"a": 1}
    for text, message in (("{", "is not JSON"), ("[1]", "is not a JSON object")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_json(path, optional=True)


def write_index(directory: Path, weight_map: object) -> None:
    (directory / WEIGHT_INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_weights_are_all_files_or_those_of_the_index(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no \*\.safetensors in"):
        weight_files(tmp_path)
    one, two, whole = (tmp_path / f"{name}.safetensors" for name in ("1", "2", "consolidated"))
    for path in (whole, two, one):
        path.touch()
    assert weight_files(tmp_path) == (one, two, whole)
    write_index(tmp_path, {"visual.b": one.name, "visual.a": one.name, "model.a": two.name})
    assert weight_files(tmp_path) == (one, two)


def test_a_missing_file_of_weights_is_named_unless_nobody_wants_it(tmp_path: Path) -> None:
    (tmp_path / "1.safetensors").touch()
    write_index(tmp_path, {"visual.a": "1.safetensors", "model.a": "2.safetensors"})
    with pytest.raises(ValueError, match=r"names 2\.safetensors, which is not there"):
        weight_files(tmp_path)
    wanted = weight_files(tmp_path, wanted=lambda name: name.startswith("visual."))
    assert wanted == (tmp_path / "1.safetensors",)


@pytest.mark.parametrize("weight_map", [None, ["1.safetensors"], {"visual.a": 1}])
def test_an_index_that_is_none_is_refused(tmp_path: Path, weight_map: object) -> None:
    (tmp_path / "1.safetensors").touch()
    write_index(tmp_path, weight_map)
    with pytest.raises(ValueError, match="has no weight_map"):
        weight_files(tmp_path)
