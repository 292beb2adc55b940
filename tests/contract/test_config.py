"""The config tree: layers, strictness, round trips, and a surface that grows by decision only."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from chiasm.cli.reference import configuration
from chiasm.cli.service import CONFIG_CLASSES, parse
from chiasm.config import DecoderConfig, EncoderConfig, GatewayConfig
from chiasm.config.load import Setting, dump, load, settings, to_flags, to_mapping

ROOT = Path(__file__).resolve().parents[2]
FLAGS = Path(__file__).with_name("flags.txt")
EVERY = [(cls, setting) for cls in CONFIG_CLASSES for setting in settings(cls)]


def sample(setting: Setting) -> tuple[str, Any]:
    """A text that differs from the default, and the value it stands for."""
    special = {
        "async_scheduling": ("off", "off"),
        "attention_backend": ("reference", "reference"),
        "digest": ("full", "full"),
        "load_format": ("dummy", "dummy"),
        "discovery": ("dns", "dns"),
        "front_door": ("tls", "tls"),
        "transport": ("grpc", "grpc"),
        "slab_memory": ("host", "host"),
        "mem_fraction_static": ("0.5", 0.5),
        "limit_mm_per_prompt": ("image=2,video=1", ("image=2", "video=1")),
    }
    if setting.name in special:
        return special[setting.name]
    by_type: dict[Any, tuple[str, Any]] = {
        bool: (str(not setting.default).lower(), not setting.default),
        int: ("7", 7),
        float: ("1.25", 1.25),
        str: ("some text", "some text"),
        tuple[str, ...]: ("a:1, b:2", ("a:1", "b:2")),
    }
    return by_type[setting.type]


def value_at(config: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        config = getattr(config, name)
    return config


def nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    return value


@pytest.mark.parametrize(("cls", "setting"), EVERY, ids=lambda v: getattr(v, "name", None))
def test_every_setting_has_help_and_is_read_from_everywhere(
    cls: type, setting: Setting, tmp_path: Path
) -> None:
    assert len(setting.help) > 5, "a docstring below the field becomes its help"
    text, value = sample(setting)
    model = {} if setting.name == "model" else {"model": "m"}
    file = tmp_path / "config.json"
    plain = list(value) if isinstance(value, tuple) else value
    file.write_text(json.dumps(nested(setting.path, plain)))
    for config in (
        load(cls, env={setting.env: text}, flags=model),
        load(cls, flags={setting.name: value} | model),
        load(cls, file=file, flags=model),
    ):
        assert value_at(config, setting.path) == value
        if model:
            default = dataclasses.replace(load(cls, flags=model))
            assert config != default, "nothing else may change, but this must"


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: m\nserver: {port: 1, host: a, log_level: debug}\n")
    config = load(
        EncoderConfig, file=file, env={"CHIASM_PORT": "2", "CHIASM_HOST": "b"}, flags={"port": 3}
    )
    server = config.server
    assert (server.port, server.host, server.log_level) == (3, "b", "debug")


@pytest.mark.parametrize("suffix", [".yaml", ".json", ".toml"])
def test_file_formats_are_equal(tmp_path: Path, suffix: str) -> None:
    texts = {
        ".yaml": "model: m\nparallel:\n  tp_size: 2\n",
        ".json": '{"model": "m", "parallel": {"tp_size": 2}}',
        ".toml": 'model = "m"\n[parallel]\ntp_size = 2\n',
    }
    file = tmp_path / f"c{suffix}"
    file.write_text(texts[suffix])
    assert load(DecoderConfig, file=file).parallel.tp_size == 2


BAD_FILES = {
    "server: {prot: 1}": "unknown key server.prot; did you mean server.port",
    "sever: {port: 1}": "unknown key sever",
    "port: 1": "unknown key port; did you mean server.port",
    "server: 5": "server must hold settings, got 5",
    "server: {port: '80x'}": "server.port: must be a whole number, got '80x'",
    "server: {port: 80.5}": "server.port: must be a whole number, got 80.5",
    "server: {port: true}": "server.port: must be a whole number, got True",
    "server: {drain_s: .inf}": "server.drain_s: must be finite",
    "server: {host: 5}": "server.host: must be text, got 5",
    "model: [a]": "model: must be text",
    "device: [": "while parsing",
    "- a": "must hold a mapping",
}


@pytest.mark.parametrize(("text", "message"), BAD_FILES.items())
def test_bad_files_are_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text + "\n")
    with pytest.raises(ValueError, match="c.yaml") as caught:
        load(EncoderConfig, file=file, flags={"model": "m"})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_strange_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        load(EncoderConfig, file=tmp_path / "none.yaml")
    (tmp_path / "c.ini").write_text("x")
    with pytest.raises(ValueError, match="must end in .yaml"):
        load(EncoderConfig, file=tmp_path / "c.ini")
    (tmp_path / "empty.yaml").write_text("")
    assert load(EncoderConfig, file=tmp_path / "empty.yaml", flags={"model": "m"}).model == "m"


@pytest.mark.parametrize(
    ("cls", "flags", "message"),
    [
        (DecoderConfig, {"transport": "tcp"}, "--transport must be auto, nixl or grpc, got 'tcp'"),
        (EncoderConfig, {"digest": ""}, "--digest must be sampled or full, got ''"),
        (EncoderConfig, {"preprocess_workers": 0}, "--preprocess-workers must be positive, got 0"),
        (DecoderConfig, {"tp_size": 0}, "--tp-size must be positive, got 0"),
        (GatewayConfig, {"max_inflight": 0}, "--max-inflight must be positive, got 0"),
        (GatewayConfig, {"max_items": -1}, "--max-items must not be negative, got -1"),
    ],
)
def test_values_that_cannot_be_are_refused_by_their_flag(
    cls: type, flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        load(cls, flags=flags | {"model": "m"})
    assert str(caught.value) == message


def test_the_model_is_required() -> None:
    for cls in CONFIG_CLASSES:
        with pytest.raises(ValueError, match="--model is required"):
            load(cls)


def test_unknown_variables_fail_and_foreign_ones_pass() -> None:
    with pytest.raises(ValueError, match=r"unknown variable CHIASM_PROT; did you mean CHIASM_PORT"):
        load(EncoderConfig, env={"CHIASM_PROT": "1"}, flags={"model": "m"})
    env = {"CHIASM_KV_BLOCKS": "1", "PATH": "/bin"}
    known = frozenset({"CHIASM_KV_BLOCKS"})
    assert load(EncoderConfig, env=env, flags={"model": "m"}, known_env=known).model == "m"


def test_kubernetes_service_links_are_no_settings() -> None:
    env = {
        "CHIASM_PORT": "tcp://10.0.0.7:8000",
        "CHIASM_PORT_8000_TCP": "tcp://10.0.0.7:8000",
        "CHIASM_PORT_8000_TCP_ADDR": "10.0.0.7",
        "CHIASM_SERVICE_HOST": "10.0.0.7",
        "CHIASM_SERVICE_PORT": "8000",
        "CHIASM_GATEWAY_SERVICE_PORT_HTTP": "8000",
        "CHIASM_GRPC_PORT": "50051",
    }
    config = load(GatewayConfig, env=env, flags={"model": "m"})
    assert (config.server.port, config.grpc_port) == (8000, 50051)


@pytest.mark.parametrize("cls", CONFIG_CLASSES)
def test_what_is_printed_can_be_read_again(cls: type, tmp_path: Path) -> None:
    flags = {s.name: sample(s)[1] for s in settings(cls)}
    for given in ({"model": "m"}, flags):
        config = load(cls, flags=given)
        file = tmp_path / "printed.yaml"
        file.write_text(dump(config))
        assert load(cls, file=file) == config
        assert yaml.safe_load(dump(config)) == to_mapping(config)


@pytest.mark.parametrize("cls", CONFIG_CLASSES)
def test_a_config_can_be_said_in_flags_alone(cls: type) -> None:
    """Every setting is said: the environment adds nothing."""
    env = {setting.env: sample(setting)[0] for setting in settings(cls)}
    for given in ({"model": "m"}, {s.name: sample(s)[1] for s in settings(cls)}):
        config = load(cls, flags=given)
        if isinstance(config, GatewayConfig):  # an empty list cannot be said over a given one
            env = {}
        assert parse(cls, "test", to_flags(config), env) == config


@pytest.mark.parametrize("cls", CONFIG_CLASSES)
def test_trees_are_frozen(cls: type) -> None:
    config = load(cls, flags={"model": "m"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.model = "other"


def test_no_new_flags_by_accident() -> None:
    """Every option is a debt: a new one is written into flags.txt in the same change."""
    now = [f"{cls.__name__} {setting.flag}" for cls, setting in EVERY]
    assert sorted(now) == FLAGS.read_text().splitlines()


def test_the_reference_page_is_current() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == configuration(), "run make docs"
