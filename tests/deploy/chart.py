"""The chart as tests see it: scenarios, rendering, objects, and what the args of a pod mean."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import helm_python
import yaml

from chiasm.cli.service import parse
from chiasm.config import DecoderConfig, EncoderConfig, GatewayConfig

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "chiasm"
SCENARIOS = sorted((CHART / "ci").glob("*-values.yaml"))
CONFIGS: dict[str, type] = {
    "gateway": GatewayConfig,
    "encoder": EncoderConfig,
    "decoder": DecoderConfig,
}
POD_IP = "10.1.2.3"
IMAGE = {"image": {"repository": "registry.example.com/chiasm"}}

Object = dict[str, Any]


@functools.cache
def chart() -> helm_python.Chart:
    """Loaded once: its values, its schema and its templates do not change under a test."""
    return helm_python.Chart.load(CHART)


def scenario(path: Path) -> Object:
    """Values of one file in ci/."""
    values: Object = yaml.safe_load(path.read_text(encoding="utf-8"))
    return values


def nested(key: str, value: Any) -> Object:
    """`a.b` = 1 as {a: {b: 1}}, with an image repository beside it."""
    tree: Any = value
    for name in reversed(key.split(".")):
        tree = {name: tree}
    return IMAGE | tree


def render(values: Object, *, release: str = "chiasm", namespace: str = "models") -> dict[str, str]:
    """Template file -> text, in the order of files. Raises HelmError."""
    return _render(json.dumps(values), release, namespace)


@functools.cache
def _render(values: str, release: str, namespace: str) -> dict[str, str]:
    rendered = chart().render(json.loads(values), name=release, namespace=namespace)
    prefix = "chiasm/templates/"
    return {name.removeprefix(prefix): text for name, text in sorted(rendered.items())}


def objects(values: Object, *, release: str = "chiasm") -> list[Object]:
    """Everything that would be installed. Shared by tests: not to be changed."""
    return _objects(json.dumps(values), release)


@functools.cache
def _objects(values: str, release: str) -> list[Object]:
    rendered = render(json.loads(values), release=release)
    texts = [text for name, text in rendered.items() if name != "NOTES.txt"]
    found = [item for text in texts for item in yaml.load_all(text, Loader=StrictLoader)]
    return [item for item in found if item]


def manifest(values: Object) -> str:
    """All objects as one file, for reading: blank lines and document marks made regular."""
    texts = [text for name, text in render(values).items() if name != "NOTES.txt"]
    documents = [part for text in texts for part in re.split(r"^---$", text, flags=re.M)]
    lines = ("\n".join(filter(str.strip, part.splitlines())) for part in documents)
    return "".join(f"---\n{text}\n" for text in lines if text)


def of_kind(found: list[Object], kind: str) -> dict[str, Object]:
    """Objects of one kind by role: the last word of their names."""
    return {
        item["metadata"]["name"].rpartition("-")[2]: item for item in found if item["kind"] == kind
    }


def templates(found: list[Object]) -> dict[str, Object]:
    """The pod templates of the roles; of a decoder over several nodes, the first node's."""
    made = {role: item["spec"]["template"] for role, item in of_kind(found, "Deployment").items()}
    for item in found:
        if item["kind"] == "LeaderWorkerSet":
            made["decoder"] = item["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
    return made


def pods(found: list[Object]) -> dict[str, Object]:
    """The pod specs of the roles."""
    return {role: template["spec"] for role, template in templates(found).items()}


def config_of(role: str, pod: Object) -> Any:
    """What the pod's args mean to the service itself."""
    (container,) = pod["containers"]
    env = tuple((item["name"], item.get("value", "")) for item in container["env"])
    return _config_of(role, tuple(container["args"]), env)


@functools.cache
def _config_of(role: str, args: tuple[str, ...], env: tuple[tuple[str, str], ...]) -> Any:
    return parse(CONFIGS[role], role, [arg.replace("$(POD_IP)", POD_IP) for arg in args], dict(env))


class StrictLoader(yaml.CSafeLoader):
    """A key given twice is an error: Kubernetes would take one of the two."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        assert not twice, f"{node.start_mark}: {twice}"
        return super().construct_mapping(node, deep=deep)
