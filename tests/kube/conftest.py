"""A real API server for the tests of this directory; where there is none they are skipped."""

from __future__ import annotations

import ssl
from collections.abc import Iterator

import pytest

from tests.kube.cluster import NAMESPACE, Cluster
from tests.kube.control_plane import MISSING, ControlPlane, is_built
from tests.kube.translation import translated


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """An empty cluster with the namespace that releases go to."""
    if not is_built():
        pytest.skip(MISSING)
    plane = ControlPlane(tmp_path_factory.mktemp("cluster"))
    try:
        plane.start()
        key = plane.certificate.with_suffix(".key")
        with translated(plane.url, plane.certificate, key) as url:
            found = Cluster(plane, url, ssl.create_default_context(cafile=str(plane.certificate)))
            body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
            assert found.call("POST", "api/v1/namespaces", json=body).status_code == 201
            yield found
    finally:
        plane.stop()
