"""Objects of other projects, against the schemas of their own CRDs in `crds/`.

A CRD lets unknown fields pass: they are dropped by the API server. Here they are errors, as they
are for `kubectl --validate=strict`. Where both are known, an object must fit the schema of a
released CRD as well as that of the newest API types. tools/crd_schemas.py writes them;
LeaderWorkerSet's is by hand, since no package has it.
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import jsonschema
from kubernetes_validate import utils as kubernetes

Schema = dict[str, Any]
Kind = tuple[str, str]

CRDS = Path(__file__).resolve().parent / "crds"
PRESERVE = "x-kubernetes-preserve-unknown-fields"
INT_OR_STRING = "x-kubernetes-int-or-string"


@functools.cache
def crds() -> dict[Kind, tuple[Schema, ...]]:
    """(apiVersion, kind) -> schemas of `spec`, the newest first."""
    found = defaultdict(list)
    for file in sorted(CRDS.glob("*.json")):
        crd = json.loads(file.read_text(encoding="utf-8"))
        found[crd["apiVersion"], crd["kind"]].append(crd["spec"])
    return {kind: tuple(schemas) for kind, schemas in found.items()}


def kind_of(item: Schema) -> Kind:
    """As `crds` has it."""
    return item["apiVersion"], item["kind"]


def closed(schema: Schema) -> Schema:
    """JSON schema of a CRD's, in which a field that the CRD does not know is an error."""
    if schema.get(INT_OR_STRING):
        return {"type": ["integer", "string"]}
    result = {key: value for key, value in schema.items() if key != "format"}
    if schema.get("pattern", "").startswith("^(?i)"):
        result["pattern"] = "(?i)^" + schema["pattern"][5:]  # Go's way to write it
    if "properties" in schema:
        result["properties"] = {key: closed(part) for key, part in schema["properties"].items()}
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            result[key] = closed(schema[key])
    if schema.get("type") == "object" and not schema.get(PRESERVE):
        result.setdefault("additionalProperties", False)
    return result


@functools.cache
def _checks(kind: Kind) -> tuple[jsonschema.Draft7Validator, ...]:
    return tuple(jsonschema.Draft7Validator(closed(schema)) for schema in crds()[kind])


def check(item: Schema, version: str) -> None:
    """Raises a ValidationError for what its CRD, or Kubernetes of this version, does not know."""
    assert set(item) == {"apiVersion", "kind", "metadata", "spec"}
    metadata = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": item["metadata"]}
    kubernetes.validate(metadata, version, strict=True)
    for validator in _checks(kind_of(item)):
        validator.validate(item["spec"])
