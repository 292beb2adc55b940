"""What requests hold while they run: it must be gone when they are."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from tests.integration.cluster import Cluster

AT_REST = {
    "encoder": ("open_encodes", "open_fetches", "held_bytes", "pending_patches"),
    "decoder": (
        "num_requests_running",
        "num_requests_waiting",
        "waiting_tokens",
        "slab_pages_held",
        "kv_cache_usage_ratio",
    ),
    "gateway": ("num_requests_running", "media_bytes"),
}


def held(cluster: Cluster) -> dict[str, float]:
    """Everything that must be 0 at rest and is not."""
    found = {}
    for node in (*cluster.encoders, *cluster.decoders):
        samples = node.metrics()
        prefix = "chiasm_encoder_" if node.role == "encoder" else "chiasm_"
        for name in AT_REST[node.role]:
            found[f"{node.role} {node.port} {name}"] = samples[prefix + name]
    samples = cluster.metrics()
    for name in AT_REST["gateway"]:
        found[f"gateway {name}"] = samples[f"chiasm_{name}"]
    return {name: value for name, value in found.items() if value}


def resources(cluster: Cluster) -> dict[str, int]:
    """Tasks of the gateway; threads, open files and children of every process."""
    found = {"gateway tasks": int(cluster.metrics()["chiasm_gateway_tasks"])}
    nodes = [(n.role, n.pid) for n in (*cluster.encoders, *cluster.decoders)]
    for role, pid in (*nodes, ("gateway", cluster.gateway.process.pid)):
        process = Path(f"/proc/{pid}")
        found[f"{role} {pid} threads"] = len(list((process / "task").iterdir()))
        found[f"{role} {pid} files"] = len(list((process / "fd").iterdir()))
        found[f"{role} {pid} children"] = _num_children(process)
    return found


def grown(cluster: Cluster, baseline: dict[str, int]) -> dict[str, int]:
    """By how much `resources` are above the baseline, leaving two of each to chance."""
    now = resources(cluster)
    return {name: now[name] - count for name, count in baseline.items() if now[name] > count + 2}


def _num_children(process: Path) -> int:
    found = 0
    for task in (process / "task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # threads end at any time
            found += len((task / "children").read_text().split())
    return found
