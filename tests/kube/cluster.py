"""A cluster as a test uses it: objects over HTTP, helm, and EndpointSlices written by hand."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python
import httpx
import yaml

from tests.deploy.chart import CHART, Object
from tests.kube.control_plane import ADMIN, ControlPlane

NAMESPACE = "models"
RELEASE = "chiasm"
PLURALS = {
    "Deployment": "apis/apps/v1/namespaces/models/deployments",
    "NetworkPolicy": "apis/networking.k8s.io/v1/namespaces/models/networkpolicies",
    "Pod": "api/v1/namespaces/models/pods",
    "PodDisruptionBudget": "apis/policy/v1/namespaces/models/poddisruptionbudgets",
    "Role": "apis/rbac.authorization.k8s.io/v1/namespaces/models/roles",
    "RoleBinding": "apis/rbac.authorization.k8s.io/v1/namespaces/models/rolebindings",
    "Secret": "api/v1/namespaces/models/secrets",
    "Service": "api/v1/namespaces/models/services",
    "ServiceAccount": "api/v1/namespaces/models/serviceaccounts",
}
SLICES = "apis/discovery.k8s.io/v1/namespaces/models/endpointslices"
OWN = {"labelSelector": f"app.kubernetes.io/instance={RELEASE}"}


@dataclass(frozen=True)
class Cluster:
    """An API server, the address of the proxy before it, and an admin's means."""

    plane: ControlPlane
    url: str
    trust: ssl.SSLContext

    def call(self, method: str, path: str, *, token: str = ADMIN, **more: Any) -> httpx.Response:
        """One request as whoever holds the token."""
        headers = {"authorization": f"Bearer {token}"}
        url = f"{self.url}/{path}"
        return httpx.request(method, url, headers=headers, verify=self.trust, timeout=60, **more)

    def get(self, path: str, **params: str) -> Object:
        """An object, or a list of them, as the admin."""
        reply = self.call("GET", path, params=params)
        assert reply.status_code == 200, reply.text
        found: Object = reply.json()
        return found

    def own(self, kind: str) -> dict[str, Object]:
        """The release's objects of a kind, by name."""
        items = self.get(PLURALS[kind], **OWN)["items"]
        return {item["metadata"]["name"]: item for item in items}

    def kubeconfig(self, directory: Path, token: str) -> Path:
        """A file by which clients come as the holder of the token."""
        file = directory / "kubeconfig"
        context = {"cluster": "c", "user": "u", "namespace": NAMESPACE}
        server = {"server": self.url, "certificate-authority": str(self.plane.certificate)}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": server}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "x", "context": context}],
            "current-context": "x",
        }
        file.write_text(yaml.safe_dump(content))
        return file

    def helm(self) -> helm_python.Config:
        """Helm as the admin."""
        return helm_python.Config(
            kube_apiserver=self.url,
            kube_token=ADMIN,
            kube_ca_file=self.plane.certificate,
            namespace=NAMESPACE,
            kubeconfig_content=EMPTY,
        )

    def token_of(self, service_account: str) -> str:
        """A token as a pod of this service account gets it."""
        path = f"{PLURALS['ServiceAccount']}/{service_account}/token"
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        reply = self.call("POST", path, json=body)
        assert reply.status_code == 201, reply.text
        return str(reply.json()["status"]["token"])

    def put_slice(self, name: str, service: str, address: str, *, ready: bool = True) -> None:
        """Makes or replaces the slice of one pod, as the endpoint slice controller would."""
        host, _, port = address.rpartition(":")
        body = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [host], "conditions": {"ready": ready}}],
            "ports": [{"name": "grpc", "port": int(port), "protocol": "TCP"}],
        }
        reply = self.call("POST", SLICES, json=body)
        if reply.status_code == 409:
            reply = self.call("PUT", f"{SLICES}/{name}", json=body)
        assert reply.is_success, reply.text

    def delete_slice(self, name: str) -> None:
        """Takes the slice away."""
        reply = self.call("DELETE", f"{SLICES}/{name}")
        assert reply.is_success, reply.text


EMPTY = yaml.safe_dump({"apiVersion": "v1", "kind": "Config"})


def load_chart() -> helm_python.Chart:
    """The chart from its directory."""
    return helm_python.Chart.load(CHART)
