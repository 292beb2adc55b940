"""Who is there: addresses by configuration, verified by Describe, watched by WatchLoad."""

from gateway.discovery.base import Discovery
from gateway.discovery.dns import DnsDiscovery
from gateway.discovery.fleet import Fleet
from gateway.discovery.kubernetes import KubernetesDiscovery
from gateway.discovery.static import StaticDiscovery, discovery_for

__all__ = [
    "Discovery",
    "DnsDiscovery",
    "Fleet",
    "KubernetesDiscovery",
    "StaticDiscovery",
    "discovery_for",
]
