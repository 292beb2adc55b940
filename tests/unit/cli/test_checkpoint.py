"""Names of models: what they stand for, how a wrong one is refused; and their JSON files."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest

from chiasm.checkpoint import WEIGHT_INDEX, read_json, resolve_model, weight_files
from chiasm.demo import checkpoint_dir


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


def test_a_cached_hub_id_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    calls: list[dict[str, object]] = []

    def snapshot_download(repo_id: str, **options: object) -> str:
        calls.append({"repo_id": repo_id, **options})
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("some-org/some-model-7B") == tmp_path
    assert [call["repo_id"] for call in calls] == ["some-org/some-model-7B"]
    assert calls[0]["local_files_only"] is True
    assert "*.bin" not in str(calls[0]["allow_patterns"]), "pickled weights are never fetched"


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
