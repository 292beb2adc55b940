"""The chart in a real API server by helm 4: install, upgrade, rollback, uninstall."""

from __future__ import annotations

import pytest

from tests.deploy.chart import IMAGE, Object, objects
from tests.kube.cluster import NAMESPACE, PLURALS, RELEASE, Cluster, load_chart

pytestmark = pytest.mark.timeout(600)


def args_of(cluster: Cluster, role: str) -> list[str]:
    deployment = cluster.own("Deployment")[f"chiasm-{role}"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    found: list[str] = container["args"]
    return found


def assert_holds(cluster: Cluster, values: Object) -> None:
    """The release's objects in the cluster are those that the values render to, and no others."""
    wanted = {(i["kind"], i["metadata"]["name"]): i for i in objects(values) if not is_hook(i)}
    found = {(kind, name): i for kind in PLURALS for name, i in cluster.own(kind).items()}
    assert set(found) == set(wanted)
    for key, item in wanted.items():
        assert found[key]["metadata"]["labels"] == item["metadata"]["labels"]
        if key[0] == "Deployment":
            (ours,), (theirs,) = (
                i["spec"]["template"]["spec"]["containers"] for i in (item, found[key])
            )
            for name in ("args", "image", "resources", "securityContext", "volumeMounts"):
                assert theirs[name] == ours[name], (key, name)


def is_hook(item: Object) -> bool:
    return "helm.sh/hook" in item["metadata"].get("annotations", {})


def test_a_release_is_installed_upgraded_rolled_back_and_uninstalled(cluster: Cluster) -> None:
    changed = IMAGE | {
        "gateway": {"discovery": "kubernetes"},
        "encoder": {"replicas": 3, "config": {"segment_rows": 77}},
    }
    with cluster.helm() as helm:
        tried = helm.install(load_chart(), RELEASE, IMAGE, namespace=NAMESPACE, dry_run="server")
        assert "manifest" in str(tried)
        assert not cluster.own("Deployment"), "only tried"

        helm.install(load_chart(), RELEASE, IMAGE, namespace=NAMESPACE)
        assert_holds(cluster, IMAGE)
        assert not cluster.own("Role")

        helm.upgrade(load_chart(), RELEASE, changed, namespace=NAMESPACE)
        assert_holds(cluster, changed)
        assert cluster.own("Deployment")["chiasm-encoder"]["spec"]["replicas"] == 3
        assert "--segment-rows=77" in args_of(cluster, "encoder")

        helm.rollback(RELEASE)
        assert_holds(cluster, IMAGE)
        assert "--segment-rows=77" not in args_of(cluster, "encoder")
        assert [item["revision"] for item in helm.history(RELEASE)] == [1, 2, 3]

        helm.uninstall(RELEASE)
    assert not [kind for kind in PLURALS if cluster.own(kind)]
    assert not cluster.get(PLURALS["Secret"], **{"labelSelector": "owner=helm"})["items"]
