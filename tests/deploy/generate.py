"""What of the chart is generated: settings in values and schema, and two rendered examples.

`make chart` writes it, a test compares. The settings come from chiasm.config, without those that
the chart knows better.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from chiasm.config.load import Setting, settings
from tests.deploy.chart import CHART, CONFIGS, manifest, scenario

GOLDEN = Path(__file__).resolve().parent / "golden"
EXAMPLES = ("01-demo", "02-gpu")
VALUES = CHART / "values.yaml"
SCHEMA = CHART / "values.schema.json"

OWN = frozenset(
    {"model", "host", "port", "advertise_host", "metrics_port", "transport", "dp_size", "tp_size"}
    | {"pp_size", "rank_token_file", "grpc_port", "discovery", "encoder_urls", "decoder_urls"}
    | {"api_key_file", "front_door"}
    | {f"front_{name}_file" for name in ("cert", "key", "ca")}
    | {f"tls_{name}" for name in ("cert_file", "key_file", "ca_file", "peer_name")}
)
_TYPES: dict[Any, dict[str, Any]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    tuple[str, ...]: {"type": "array", "items": {"type": "string"}},
}


def tree(role: str, leaf: Callable[[Setting], Any]) -> dict[str, Any]:
    """The role's settings that are values of the chart, nested as in a configuration file."""
    result: dict[str, Any] = {}
    for setting in settings(CONFIGS[role]):
        if setting.name not in OWN:
            node = result
            for key in setting.path[:-1]:
                node = node.setdefault(key, {})
            node[setting.name] = leaf(setting)
    return result


def values_text(text: str) -> str:
    """values.yaml with the `config` of each role, which is the last of its keys, made anew."""
    for role in CONFIGS:
        block = "\n".join(_lines(tree(role, lambda setting: setting.default), "    "))
        pattern = rf"(^{role}:\n(?:  .*\n)*?  config:).*\n(?:    .*\n)*"
        text, count = re.subn(pattern, rf"\g<1>\n{block}\n", text, flags=re.M)
        assert count == 1, f"values.yaml has no {role}.config"
    return text


def schema_text(text: str) -> str:
    """values.schema.json with the definitions of the settings made anew."""
    schema = json.loads(text)
    for role in CONFIGS:
        schema["definitions"][f"{role}Config"] = _closed(
            tree(role, lambda setting: _TYPES[setting.type] | {"description": setting.help})
        )
    return json.dumps(schema, indent=2) + "\n"


def example_text(name: str) -> str:
    """The rendered example."""
    return manifest(scenario(CHART / "ci" / f"{name}-values.yaml"))


def generated() -> Iterator[tuple[Path, str]]:
    """Every file with what it should hold."""
    yield VALUES, values_text(VALUES.read_text(encoding="utf-8"))
    yield SCHEMA, schema_text(SCHEMA.read_text(encoding="utf-8"))
    for name in EXAMPLES:
        yield GOLDEN / f"{name}.yaml", example_text(name)


def _lines(node: dict[str, Any], indent: str) -> Iterator[str]:
    for key, value in node.items():
        if isinstance(value, dict):
            yield f"{indent}{key}:"
            yield from _lines(value, indent + "  ")
        else:
            plain = list(value) if isinstance(value, tuple) else value
            text = yaml.safe_dump(plain, default_flow_style=True).removesuffix("...\n").strip()
            yield f"{indent}{key}: {text}"


def _closed(properties: dict[str, Any]) -> dict[str, Any]:
    leaves = {
        key: value if isinstance(value.get("type"), str) else _closed(value)
        for key, value in properties.items()
    }
    return {"type": "object", "additionalProperties": False, "properties": leaves}


if __name__ == "__main__":
    for path, text in generated():
        path.write_text(text, encoding="utf-8")
