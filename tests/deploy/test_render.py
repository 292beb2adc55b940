"""Every scenario renders, lints and is valid Kubernetes; what points at something finds it."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import pytest
from kubernetes_validate import utils as schemas

from tests.deploy import foreign
from tests.deploy.chart import (
    CHART,
    CONFIGS,
    IMAGE,
    SCENARIOS,
    Object,
    objects,
    of_kind,
    pods,
    render,
    scenario,
    templates,
)

VERSIONS = [f"1.{minor}" for minor in range(30, 38)]
NEWEST = VERSIONS[-1]
IMAGE_VOLUMES = VERSIONS.index("1.33")
LEADER = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}  # set by its controller

by_scenario = pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)


@pytest.fixture(scope="module", autouse=True)
def schemas_read_once() -> Iterator[None]:
    """kubernetes-validate reads megabytes for every object."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schemas, "schema_contents", functools.cache(schemas.schema_contents))
        yield


@functools.cache
def check_object(text: str, version: str) -> None:
    schemas.validate(json.loads(text), version, strict=True)


def test_there_are_enough_scenarios() -> None:
    assert len(SCENARIOS) >= 15
    assert [int(path.name[:2]) for path in SCENARIOS] == list(range(1, len(SCENARIOS) + 1))


@by_scenario
def test_lint_is_clean(path: Path) -> None:
    report = helm_python.lint(CHART, scenario(path), strict=True, quiet=True)
    assert not report["errors"]
    # An icon is for shop windows.
    assert not [m for m in report["messages"] if m["error"] != "icon is recommended"]


def test_the_bare_chart_lints() -> None:
    assert not helm_python.lint(CHART, strict=True, quiet=True)["errors"]


@by_scenario
def test_objects_are_valid_kubernetes(path: Path) -> None:
    volumes = scenario(path).get("model", {}).get("source") == "image"
    versions = VERSIONS[IMAGE_VOLUMES:] if volumes else VERSIONS
    for item in objects(scenario(path)):
        if foreign.kind_of(item) in foreign.crds():
            foreign.check(item, NEWEST)
            for number, template in enumerate(pod_templates(item)):
                for version in versions:
                    check_object(json.dumps(as_pod(template, number)), version)
            continue
        for version in versions:
            check_object(json.dumps(item), version)


def pod_templates(item: Object) -> list[Object]:
    parts = item["spec"].get("leaderWorkerTemplate", {})
    return [parts[key] for key in ("leaderTemplate", "workerTemplate") if key in parts]


def as_pod(template: Object, number: int) -> Object:
    metadata = template["metadata"] | {"name": f"pod-{number}"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def test_the_schemas_would_notice() -> None:
    """The check above fails on a key that Kubernetes does not know."""
    deployment = copy.deepcopy(of_kind(objects(IMAGE), "Deployment")["decoder"])
    deployment["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(schemas.ValidationError, match="volumeMount"):
        schemas.validate(deployment, NEWEST, strict=True)


def foreign_objects() -> dict[foreign.Kind, Object]:
    """One of each kind: the one with most in it."""
    made = [i for path in SCENARIOS for i in objects(scenario(path))]
    ours = sorted((i for i in made if foreign.kind_of(i) in foreign.crds()), key=repr)
    return {foreign.kind_of(i): i for i in sorted(ours, key=lambda i: len(repr(i)))}


def test_every_foreign_kind_is_in_a_scenario() -> None:
    assert foreign.crds().keys() == foreign_objects().keys()


def test_every_foreign_schema_says_where_it_is_from() -> None:
    for file in foreign.CRDS.glob("*.json"):
        crd = json.loads(file.read_text())
        assert crd["licence"] == "Apache-2.0"
        assert crd["origin"]
        assert len(crd["sha256"]) == (64 if crd["package"] else 0)
        jsonschema.Draft7Validator.check_schema(foreign.closed(crd["spec"]))


def mutants(spec: Any, schema: Object) -> Iterator[tuple[str, Any]]:
    """The spec with one field more, or one value of another type, at each place of it."""
    if schema.get(foreign.PRESERVE):
        return  # a pod's template, which is checked as a pod
    yield "type", 0.5
    if isinstance(spec, dict):
        if "additionalProperties" not in schema:
            yield "field", spec | {"unheardOf": 1}
        for key, value in spec.items():
            part = schema.get("additionalProperties") or schema["properties"][key]
            for what, wrong in mutants(value, part):
                yield f"{key}.{what}", spec | {key: wrong}
    if isinstance(spec, list):
        for number, value in enumerate(spec):
            for what, wrong in mutants(value, schema["items"]):
                yield f"{number}.{what}", [*spec[:number], wrong, *spec[number + 1 :]]


@pytest.mark.parametrize("kind", foreign.crds(), ids=lambda kind: kind[1])
def test_the_schemas_of_foreign_kinds_would_notice(kind: foreign.Kind) -> None:
    """An unknown field at any place, a value of a wrong type at any place, a name misspelt."""
    item = foreign_objects()[kind]
    foreign.check(item, NEWEST)
    wrong = dict(mutants(item["spec"], foreign.crds()[kind][0]))
    assert len(wrong) > 4
    for key in item["spec"]:
        value = item["spec"][key]
        rest = {other: item["spec"][other] for other in item["spec"] if other != key}
        wrong[f"{key} misspelt"] = rest | {f"{key}x": value}
    for what, spec in wrong.items():
        try:
            foreign.check(item | {"spec": spec}, NEWEST)
        except jsonschema.ValidationError:
            continue
        pytest.fail(f"{kind[1]}: nobody noticed {what}")
    with pytest.raises(schemas.ValidationError):
        foreign.check(item | {"metadata": item["metadata"] | {"label": {}}}, NEWEST)


@by_scenario
def test_names_are_unique_and_short(path: Path) -> None:
    found = objects(scenario(path), release="x" * 53)
    names = [(item["kind"], item["metadata"]["name"]) for item in found]
    assert len(names) == len(set(names))
    assert all(len(name) <= 63 for _, name in names)


@by_scenario
def test_selectors_find_their_pods_and_no_others(path: Path) -> None:
    found = objects(scenario(path))
    labels = {role: made["metadata"]["labels"] for role, made in templates(found).items()}
    assert set(labels) == set(CONFIGS)
    if "decoder" not in of_kind(found, "Deployment"):
        labels["decoder"] = labels["decoder"] | LEADER
    for kind in ("Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"):
        for role, item in of_kind(found, kind).items():
            selector = selector_of(item)
            chosen = {r for r, own in labels.items() if selector.items() <= own.items()}
            assert chosen == {role}, kind
    for item in of_kind(found, "HorizontalPodAutoscaler").values():
        target = item["spec"]["scaleTargetRef"]
        assert [i["spec"].get("replicas") for i in found if names(i) == tuple(target.values())] == [
            None
        ]


def names(item: Object) -> tuple[str, str, str]:
    return item["apiVersion"], item["kind"], item["metadata"]["name"]


def selector_of(item: Object) -> dict[str, Any]:
    spec = item["spec"]
    selector = spec.get("selector") or spec["podSelector"]
    found: dict[str, Any] = selector.get("matchLabels", selector)
    assert "app.kubernetes.io/version" not in found, "a selector can never change"
    return found


@by_scenario
def test_ports_and_volumes_exist(path: Path) -> None:
    found = objects(scenario(path))
    claims = {i["metadata"]["name"] for i in found if i["kind"] == "PersistentVolumeClaim"}
    for role, pod in pods(found).items():
        (container,) = pod["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        service = of_kind(found, "Service")[role]
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= set(ports)
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"], "headless: peers dial the pod's port"
        policy = of_kind(found, "NetworkPolicy").get(role)
        for rule in policy["spec"]["ingress"] if policy else ():
            assert {port["port"] for port in rule.get("ports", ())} <= set(ports)
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounted = [mount["name"] for mount in container["volumeMounts"]]
        assert set(mounted) == set(volumes)
        cache = volumes.get("model", {}).get("persistentVolumeClaim", {}).get("claimName")
        if scenario(path).get("model", {}).get("source") == "hub" and cache:
            assert cache in claims


@by_scenario
def test_notes_say_what_to_do_next(path: Path) -> None:
    values = scenario(path)
    notes = render(values)["NOTES.txt"]
    assert "wait pod --for=condition=Ready" in notes
    assert ("helm -n models test" in notes) is not ("apiKeys" in values)
    assert ("networkPolicy is off" in notes) is ("17" in path.name)
    assert ("downloads the whole checkpoint" in notes) is ("05" in path.name)


def test_an_open_gateway_is_warned_about() -> None:
    values = IMAGE | {"service": {"type": "LoadBalancer"}}
    warning = "can be reached from outside and asks for no API key"
    assert warning in render(values)["NOTES.txt"]
    assert warning not in render(values | {"apiKeys": {"existingSecret": "k"}})["NOTES.txt"]
