"""From EndpointSlices to addresses: which pods of a Service may be dialled, and where. No I/O.

Slices are JSON objects of discovery.k8s.io/v1, as the API server writes them. A Service has as many
as it needs: 100 endpoints each, other ports and other address families apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.discovery.base import Peer, PeerRole

Slice = Mapping[str, Any]

SERVICE_LABEL = "kubernetes.io/service-name"
_SERVICE = re.compile(
    r"(grpc://)?(?P<name>[a-z0-9-]+)(\.(?P<namespace>[a-z0-9-]+)(\.svc(\.[a-z0-9.-]+)?)?)?"
    r":(?P<port>[a-z0-9-]+)/?"
)


@dataclass(frozen=True, slots=True)
class Service:
    """A Service whose pods are peers. `port` is a name, or a number in digits."""

    role: PeerRole
    namespace: str
    name: str
    port: str


def service_of(role: PeerRole, url: str, *, namespace: str) -> Service:
    """Reads `service:port` or `service.namespace:port`; `.svc` and what follows it may be there.

    Args:
        role: What its pods are to be.
        url: As configured.
        namespace: Where a service without one is.

    Raises:
        ValueError: It is neither.
    """
    match = _SERVICE.fullmatch(url.strip())
    if match is None:
        raise ValueError(
            f"{url!r} does not name a Service: write service:port or service.namespace:port"
        )
    return Service(role, match["namespace"] or namespace, match["name"], match["port"])


class SliceTable:
    """The slices of one namespace as last heard of, by name."""

    def __init__(self) -> None:
        self._slices: dict[str, Slice] = {}

    def replace(self, slices: Iterable[Slice]) -> None:
        """Takes in a whole list: what is not in it is gone."""
        self._slices = {item["metadata"]["name"]: item for item in slices}

    def apply(self, kind: str, item: Slice) -> None:
        """Takes in one event of a watch: ADDED, MODIFIED or DELETED."""
        if kind == "DELETED":
            self._slices.pop(item["metadata"]["name"], None)
        else:
            self._slices[item["metadata"]["name"]] = item

    def peers(self, service: Service) -> frozenset[Peer]:
        """Every address behind a Service."""
        own = [item for item in self._slices.values() if _label(item) == service.name]
        return frozenset(Peer(service.role, a) for a in addresses(own, service.port))


def addresses(slices: Iterable[Slice], port: str) -> frozenset[str]:
    """What to dial of one Service's slices.

    Endpoints that are ready, or do not say, and that are not about to end. A pod with an address of
    either family is dialled at one of them, IPv4 first: two would be two peers.
    """
    chosen: dict[str, str] = {}
    for item in sorted(slices, key=lambda item: str(item.get("addressType", ""))):
        number = _number(item, port)
        if number is None:
            continue
        for endpoint in item.get("endpoints") or ():
            if _usable(endpoint):
                address = _join(endpoint["addresses"][0], number)  # others are the same pod again
                pod = (endpoint.get("targetRef") or {}).get("uid") or address
                chosen.setdefault(pod, address)
    return frozenset(chosen.values())


def _label(item: Slice) -> str:
    return str((item["metadata"].get("labels") or {}).get(SERVICE_LABEL, ""))


def _usable(endpoint: Mapping[str, Any]) -> bool:
    conditions = endpoint.get("conditions") or {}
    ready = conditions.get("ready") is not False and not conditions.get("terminating")
    return ready and bool(endpoint.get("addresses"))


def _number(item: Slice, port: str) -> int | None:
    """The pods' port that is meant, or None.

    A slice lists the ports of pods. A number that it does not list is the port of the Service,
    which stands for the only one there is.
    """
    ports = [p for p in item.get("ports") or () if p.get("port")]
    if not port.isdigit():
        return next((int(p["port"]) for p in ports if p.get("name") == port), None)
    number = int(port)
    if not ports or any(p["port"] == number for p in ports):
        return number
    return int(ports[0]["port"]) if len(ports) == 1 else None


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
