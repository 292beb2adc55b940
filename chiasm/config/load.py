"""Reads a config tree: defaults < file < environment < flags.

Every leaf of the tree is a `Setting` with one flat name, from which its flag (`--max-items`), its
variable (`CHIASM_MAX_ITEMS`) and its place in a file (`media: {max_items: 8}`) follow. Knows no
service and parses no command line.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml

C = TypeVar("C")

ENV_PREFIX = "CHIASM_"
REQUIRED = dataclasses.MISSING

# Kubernetes writes such variables into every pod of a namespace that has a service called chiasm*.
_SERVICE_LINK = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})


@dataclass(frozen=True, slots=True)
class Setting:
    """One leaf of a config tree."""

    path: tuple[str, ...]
    type: Any
    default: Any
    help: str

    @property
    def name(self) -> str:
        """Flat name, unique in its tree."""
        return self.path[-1]

    @property
    def flag(self) -> str:
        """Command-line spelling."""
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        """Environment spelling."""
        return ENV_PREFIX + self.name.upper()


def settings(config_class: type) -> tuple[Setting, ...]:
    """Every leaf of `config_class`, in the order of declaration; their flat names are unique."""
    found = tuple(_walk(config_class, (), REQUIRED))
    names = [setting.name for setting in found]
    assert len(names) == len(set(names)), f"{config_class.__name__} has two settings of one name"
    return found


def load(
    config_class: type[C],
    *,
    file: Path | None = None,
    env: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    known_env: frozenset[str] = frozenset(),
) -> C:
    """Builds one validated config.

    Args:
        config_class: Root of the tree, a frozen dataclass.
        file: YAML, TOML or JSON, by its suffix; nested as `dump` prints it.
        env: Only names that begin with `CHIASM_` are looked at.
        flags: By flat name; None means "not given".
        known_env: Variables that belong to other services and are passed over.

    Raises:
        ValueError: A key nobody knows, a value of the wrong type, or one the tree refuses.
    """
    values: dict[tuple[str, ...], Any] = {}
    if file is not None:
        values |= _from_file(config_class, file)
    values |= _from_env(config_class, env or {}, known_env)
    for setting in settings(config_class):
        given = (flags or {}).get(setting.name)
        if given is not None:
            values[setting.path] = _coerce(setting, given, setting.flag)
        elif setting.default is REQUIRED and setting.path not in values:
            raise ValueError(
                f"{setting.flag} is required (or {setting.env}, or `{setting.name}` in --config)"
            )
    config: C = _build(config_class, (), REQUIRED, values)
    return config


def to_mapping(config: Any) -> dict[str, Any]:
    """The tree as nested plain values, tuples as lists: what files contain."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, tuple) else value

    result: dict[str, Any] = plain(dataclasses.asdict(config))
    return result


def to_flags(config: Any) -> tuple[str, ...]:
    """Flags that say every setting of the tree, so that no file or variable can add to them."""
    return tuple(
        _flag(setting, functools.reduce(getattr, setting.path, config))
        for setting in settings(type(config))
    )


def dump(config: Any) -> str:
    """The tree as YAML; `load` of it gives an equal config."""
    return str(yaml.safe_dump(to_mapping(config), sort_keys=False, allow_unicode=True))


def _walk(cls: type, prefix: tuple[str, ...], base: Any) -> list[Setting]:
    hints = get_type_hints(cls)
    docs = _field_docs(cls)
    found: list[Setting] = []
    for field in dataclasses.fields(cls):
        default = _default(field, base)
        if dataclasses.is_dataclass(hints[field.name]):
            found += _walk(hints[field.name], (*prefix, field.name), default)
        else:
            found.append(
                Setting((*prefix, field.name), hints[field.name], default, docs.get(field.name, ""))
            )
    return found


def _default(field: dataclasses.Field[Any], base: Any) -> Any:
    if base is not REQUIRED:
        return getattr(base, field.name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _field_docs(cls: type) -> dict[str, str]:
    """The string literal below each field, on one line."""
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for node, below in zip(body.body, body.body[1:], strict=False):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            docs[node.target.id] = " ".join(str(below.value.value).split())
    return docs


def _build(
    cls: type, prefix: tuple[str, ...], base: Any, values: Mapping[tuple[str, ...], Any]
) -> Any:
    hints = get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        path = (*prefix, field.name)
        default = _default(field, base)
        if dataclasses.is_dataclass(hints[field.name]):
            arguments[field.name] = _build(hints[field.name], path, default, values)
        else:
            arguments[field.name] = values.get(path, default)
    return cls(**arguments)


def _from_file(config_class: type, file: Path) -> dict[tuple[str, ...], Any]:
    tree = read_mapping(file)
    by_path = {setting.path: setting for setting in settings(config_class)}
    sections = {path[:depth] for path in by_path for depth in range(1, len(path))}
    values: dict[tuple[str, ...], Any] = {}

    def visit(node: Mapping[Any, Any], prefix: tuple[str, ...]) -> None:
        for key, value in node.items():
            path = (*prefix, str(key))
            dotted = ".".join(path)
            if path in by_path:
                values[path] = _coerce(by_path[path], value, f"{file.name}: {dotted}")
            elif path not in sections:
                raise ValueError(f"{file.name}: unknown key {dotted}{_nearest(path[-1], by_path)}")
            elif isinstance(value, Mapping):
                visit(value, path)
            elif value is not None:
                raise ValueError(f"{file.name}: {dotted} must hold settings, got {value!r}")

    visit(tree, ())
    return values


def read_mapping(file: Path) -> Mapping[Any, Any]:
    """The content of a YAML, TOML or JSON file; an empty file is an empty mapping.

    Raises:
        ValueError: It cannot be read or parsed, or holds something else; names the file.
    """
    try:
        text = file.read_text(encoding="utf-8")
        tree = _PARSERS[file.suffix.lower()](text)
    except KeyError:
        raise ValueError(f"{file}: must end in {', '.join(_PARSERS)}") from None
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from None
    except (ValueError, yaml.YAMLError) as error:  # JSON and TOML errors are ValueErrors
        raise ValueError(f"{file}: {' '.join(str(error).split())}") from None
    if tree is None:
        return {}
    if not isinstance(tree, Mapping):
        raise ValueError(f"{file}: must hold a mapping of settings")
    return tree


def _from_env(
    config_class: type, env: Mapping[str, str], known: frozenset[str]
) -> dict[tuple[str, ...], Any]:
    by_env = {setting.env: setting for setting in settings(config_class)}
    values: dict[tuple[str, ...], Any] = {}
    for name, value in env.items():
        if not name.startswith(ENV_PREFIX) or _is_service_link(name, value):
            continue
        if name in by_env:
            values[by_env[name].path] = _coerce(by_env[name], value, name)
        elif name not in known:
            near = difflib.get_close_matches(name, by_env, n=1)
            raise ValueError(
                f"unknown variable {name}" + (f"; did you mean {near[0]}?" if near else "")
            )
    return values


def _is_service_link(name: str, value: str) -> bool:
    return bool(_SERVICE_LINK.fullmatch(name)) or (name.endswith("_PORT") and "://" in value)


def _nearest(name: str, by_path: Mapping[tuple[str, ...], Setting]) -> str:
    names = {path[-1]: ".".join(path) for path in by_path}
    near = difflib.get_close_matches(name.replace("-", "_"), names, n=1)
    return f"; did you mean {names[near[0]]}?" if near else ""


def _coerce(setting: Setting, value: Any, where: str) -> Any:
    if setting.type is bool:
        return _boolean(value, where)
    if setting.type in (int, float):
        return _number(setting.type, value, where)
    if setting.type is str:
        if not isinstance(value, str):
            raise ValueError(f"{where}: must be text, got {value!r}")
        return value
    assert setting.type == tuple[str, ...], f"{setting.name}: no rule for {setting.type}"
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise ValueError(f"{where}: must be a list of texts, got {value!r}")
    return tuple(piece.strip() for item in items for piece in item.split(",") if piece.strip())


def _flag(setting: Setting, value: Any) -> str:
    if setting.type is bool:
        return setting.flag if value else f"--no-{setting.flag[2:]}"
    text = ",".join(value) if setting.type == tuple[str, ...] else str(value)
    return f"{setting.flag}={text}"


def _boolean(value: Any, where: str) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in _TRUE | _FALSE:
        return value.strip().lower() in _TRUE
    raise ValueError(f"{where}: must be true or false, got {value!r}")


def _number(kind: type[int] | type[float], value: Any, where: str) -> int | float:
    wanted = "a whole number" if kind is int else "a number"
    if isinstance(value, bool) or (kind is int and isinstance(value, float)):
        raise ValueError(f"{where}: must be {wanted}, got {value!r}")
    try:
        number = kind(value)
    except (TypeError, ValueError):
        raise ValueError(f"{where}: must be {wanted}, got {value!r}") from None
    if not math.isfinite(number):
        raise ValueError(f"{where}: must be finite, got {value!r}")
    return number


_PARSERS: Mapping[str, Any] = {
    ".yaml": yaml.safe_load,
    ".yml": yaml.safe_load,
    ".toml": tomllib.loads,
    ".json": json.loads,
}
