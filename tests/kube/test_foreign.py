"""Objects of other projects in the API server, under the schemas of their own CRDs.

An API server drops what a CRD does not know, without a word: what it keeps is what was known.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy import foreign
from tests.deploy.chart import SCENARIOS, Object, objects, scenario
from tests.integration.cluster import PATIENCE_S
from tests.kube.cluster import NAMESPACE, RELEASE, Cluster, load_chart
from tests.kube.control_plane import until
from tests.kube.translation import older

pytestmark = pytest.mark.timeout(600)

DEFINITIONS = "apis/apiextensions.k8s.io/v1/customresourcedefinitions"
PLURALS = {kind: f"{kind[1].lower()}s" for kind in foreign.crds()}
USING = [
    path
    for path in SCENARIOS
    if any(foreign.kind_of(item) in PLURALS for item in objects(scenario(path)))
]


def definition(kind: foreign.Kind) -> Object:
    """The CRD with the newest schema known."""
    group, _, version = kind[0].partition("/")
    names = {"kind": kind[1], "plural": PLURALS[kind], "singular": kind[1].lower()}
    schema = {"type": "object", "properties": {"spec": foreign.crds()[kind][0]}}
    served = {"name": version, "served": True, "storage": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{names['plural']}.{group}",
            # The API server asks for it where a group is *.k8s.io.
            "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
        },
        "spec": {
            "group": group,
            "names": names,
            "scope": "Namespaced",
            "versions": [served | {"schema": {"openAPIV3Schema": schema}}],
        },
    }


def path_of(item: Object) -> str:
    kind = foreign.kind_of(item)
    return f"apis/{kind[0]}/namespaces/{NAMESPACE}/{PLURALS[kind]}"


@pytest.fixture(scope="module")
def extended(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster that knows the other projects' kinds."""
    for kind in PLURALS:
        reply = cluster.call("POST", DEFINITIONS, json=definition(kind))
        assert reply.status_code == 201, reply.text
    paths = [f"apis/{version}/{plural}" for (version, _), plural in PLURALS.items()]
    until(lambda: all(cluster.call("GET", path).is_success for path in paths), PATIENCE_S, "CRDs")
    yield cluster


def test_scenarios_use_every_kind() -> None:
    assert {foreign.kind_of(i) for path in USING for i in objects(scenario(path))} >= set(PLURALS)


@pytest.mark.parametrize("path", USING, ids=lambda path: path.stem)
def test_the_api_server_takes_the_objects_whole(extended: Cluster, path: Path) -> None:
    values = scenario(path)
    with extended.helm() as helm:
        helm.install(load_chart(), RELEASE, values, namespace=NAMESPACE)
        try:
            ours = [i for i in objects(values) if foreign.kind_of(i) in PLURALS]
            assert ours
            for item in ours:
                kept = extended.get(f"{path_of(item)}/{item['metadata']['name']}")
                assert kept["spec"] == older(item)["spec"]
                assert kept["metadata"]["labels"].items() >= item["metadata"]["labels"].items()
        finally:
            helm.uninstall(RELEASE)
    assert not [i for i in ours if extended.get(path_of(i))["items"]]


def test_it_drops_what_is_unknown_and_refuses_what_is_wrong(extended: Cluster) -> None:
    """The check above fails on both."""
    seen: dict[foreign.Kind, Any] = {
        foreign.kind_of(i): i for path in USING for i in objects(scenario(path))
    }
    for kind in PLURALS:
        item = copy.deepcopy(seen[kind])
        item["spec"]["unheardOf"] = 1
        reply = extended.call("POST", path_of(item), json=item)
        assert reply.status_code == 201, reply.text
        assert reply.json()["spec"] == older(seen[kind])["spec"]
        reply = extended.call("POST", path_of(item), json=item | {"spec": 1})
        assert reply.status_code == 422, reply.text
