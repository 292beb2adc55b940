"""The chart as files: generated parts are current, the schema is closed, every value shows."""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Iterator
from typing import Any

import yaml

import chiasm
from chiasm.telemetry import DecoderMetrics, EncoderMetrics, GatewayMetrics
from tests.deploy.chart import CHART, Object, manifest, render
from tests.deploy.generate import generated

SCHEMA: Object = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
VALUES: Object = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
AS_IT_IS = "passed to Kubernetes as it is"


def test_generated_parts_are_current() -> None:
    old = [path.name for path, text in generated() if path.read_text(encoding="utf-8") != text]
    assert not old, "a setting or a template has changed: run `make chart` and look at what it did"


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == chiasm.__version__


def schemas(node: Any, path: str = "") -> Iterator[tuple[str, Object]]:
    if isinstance(node, dict):
        if node.get("type") == "object":
            yield path, node
        for key, value in node.items():
            yield from schemas(value, f"{path}/{key}")
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from schemas(value, f"{path}/{index}")


def test_every_object_of_the_schema_is_closed() -> None:
    """Open are only those that Kubernetes checks itself, and maps of plain values."""
    for path, schema in schemas(SCHEMA):
        extra = schema.get("additionalProperties", True)
        plain = isinstance(extra, dict) and extra != {}
        passed_on = schema.get("$comment") == AS_IT_IS or path == "/properties/global"
        assert extra is False or plain or passed_on, path


def resolve(schema: Object) -> Object:
    reference = schema.get("$ref")
    return SCHEMA["definitions"][reference.rpartition("/")[2]] if reference else schema


def test_values_and_schema_hold_the_same_keys() -> None:
    def walk(values: Object, schema: Object, path: str) -> None:
        properties = resolve(schema).get("properties", {})
        for key, value in values.items():
            known = key in properties or resolve(schema)["additionalProperties"] is not False
            assert known, f"{path}.{key}"
            if isinstance(value, dict) and resolve(properties.get(key, {})).get("properties"):
                walk(value, properties[key], f"{path}.{key}")
        if path in ("", ".defaults", ".model", ".monitoring", ".networkPolicy"):
            assert set(properties) - {"global"} == set(values), path

    walk(VALUES, SCHEMA, "")


def test_metrics_that_are_watched_exist() -> None:
    known = set()
    for metrics in (GatewayMetrics(), EncoderMetrics(), DecoderMetrics()):
        for family in metrics.registry.collect():
            known |= {family.name, f"{family.name}_total", f"{family.name}_bucket"}
    on = {"enabled": True}
    made = render({"image": {"repository": "r"}, "monitoring": {"rules": on, "dashboard": on}})
    rules = yaml.safe_load(made["prometheusrule.yaml"])["spec"]["groups"][0]["rules"]
    (board,) = yaml.safe_load(made["dashboard.yaml"])["data"].values()
    panels = [panel["targets"][0] for panel in json.loads(board)["panels"]]
    assert len(panels) == 9
    expressions = " ".join(item["expr"] for item in (*rules, *panels))
    watched = set(re.findall(r"\b(chiasm_\w+)", expressions))
    assert len(rules) >= 8
    assert watched <= known
    for role in ("gateway", "encoder", "decoder"):
        assert set(VALUES[role]["autoscaling"]["targets"]) <= known


# Everything that is off by default, on, so that its values matter.
EVERYTHING: Object = {
    "image": {"repository": "registry.example.com/chiasm"},
    "ingress": {"enabled": True, "host": "a.example.com"},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "public"}]},
    "monitoring": {name: {"enabled": True} for name in ("podMonitor", "rules", "dashboard")},
    "helmTest": {"apiKey": {"secret": "test-key"}},
    "apiKeys": {"existingSecret": "keys"},
    "tls": {"enabled": True, "frontDoor": "required", "frontSecret": "users"},
    "defaults": {"autoscaling": {"prometheus": "http://prometheus:9090"}},
    "decoder": {
        "parallelism": {"pipeline": 2, "nodes": 2},
        "rankToken": {"secret": "ranks"},
        "shmSize": "1Gi",
    },
    "model": {"source": "hub", "hub": {"id": "org/name", "token": {"secret": "hub"}}},
}
CHANGES: dict[str, Any] = {
    "image.pullPolicy": "Always",
    "image.pullSecrets": ["registry"],
    "gateway.discovery": "kubernetes",
    "model.source": "demo",
    "model.hub.id": "org/other",
    "model.image.pullPolicy": "Always",
    "model.hub.cache.accessMode": "ReadWriteOnce",
    "model.hub.cache.size": "7Gi",
    "service.type": "NodePort",
    "httpRoute.parentRefs": [{"name": "other"}],
    "httpRoute.hostnames": ["b.example.com"],
    "networkPolicy.gatewayFrom": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
    "networkPolicy.metricsFrom": [],
    "monitoring.podMonitor.interval": "1m",
    "decoder.shmSize": "2Gi",
    "decoder.parallelism.nodes": 1,
    "decoder.parallelism.tensor": 2,
    "decoder.parallelism.pipeline": 4,
    "defaults.resources": {"limits": {"cpu": 3}},
    "defaults.affinity": {"podAffinity": {}},
    "encoder.gpuResource": "example.com/gpu",
    "decoder.gpuResource": "example.com/gpu",
    "defaults.autoscaling.prometheus": "http://other:9090",
    "defaults.securityContext.capabilities.drop": ["NET_RAW"],
    "defaults.image": "mirror/all:1",
    "defaults.shmSize": "3Gi",
    "defaults.autoscaling.engine": "hpa",
    "defaults.podSecurityContext.fsGroupChangePolicy": "Always",
    "defaults.tolerations": [{"operator": "Exists"}],
    "defaults.extraEnv": [{"name": "A", "value": "b"}],
    "defaults.volumes": [{"name": "v", "emptyDir": {}}],
    "defaults.volumeMounts": [{"name": "v", "mountPath": "/v"}],
    "defaults.topologySpreadConstraints": [],
    "apiKeys.digests": ["0" * 64],
    "transport": "nixl",
    "tls.frontDoor": "tls",
    "tls.issuerRef": {"name": "ours", "kind": "ClusterIssuer"},
    "tls.duration": "9000h",
    "tls.renewBefore": "700h",
    "defaults.rdma.resource": "rdma/hca",
}
# Each of these shows only together with another one.
TOGETHER: dict[str, Object] = {
    "model.pvc": {"model": {"source": "pvc", "pvc": {"claim": "c"}}},
    "model.image": {"model": {"source": "image", "image": {"reference": "r"}}},
    "autoscaling": {"defaults": {"autoscaling": {"engine": "keda"}}},
    "digests": {"apiKeys": {"existingSecret": ""}},
    "tls.enabled": {
        "tls": {"frontDoor": "", "frontSecret": ""},
        "ingress": {"enabled": False},
        "httpRoute": {"enabled": False},
    },
    "rdma.count": {"defaults": {"rdma": {"resource": "rdma/hca"}}},
    "gpuResource": {role: {"config": {"row_dtype": "float16"}} for role in ("encoder", "decoder")},
}


def leaves(node: Object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def overlay(below: Object, above: Object) -> Object:
    result = dict(below)
    for key, value in above.items():
        both_maps = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = overlay(result[key], value) if both_maps else value
    return result


def changed(path: tuple[str, ...], value: Any) -> Any:
    dotted = ".".join(path)
    if dotted in CHANGES:
        return CHANGES[dotted]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1 if value >= 1 else value / 2 or 1
    if isinstance(value, dict):
        return {"a": "b"}
    assert isinstance(value, str), f"say in CHANGES what {dotted} could be instead of {value}"
    return f"9{value}" if value[:1].isdigit() else f"{value or 'other'}9"


def base_for(dotted: str) -> Object:
    base = EVERYTHING
    for prefix, more in TOGETHER.items():
        if prefix in dotted and not dotted.endswith(".engine"):
            base = overlay(base, more)
    return base


def test_every_value_shows() -> None:
    """Changed one at a time, each changes what would be installed. test_pods has the settings."""
    silent = []
    for path in [path for path, _ in leaves(VALUES) if "config" not in path]:
        dotted = ".".join(path)
        base = base_for(dotted)
        value: Any = functools.reduce(operator.getitem, path, overlay(VALUES, base))
        change: Any = changed(path, value)
        for key in reversed(path):
            change = {key: change}
        if manifest(overlay(base, change)) == manifest(base):
            silent.append(dotted)
    assert not silent
