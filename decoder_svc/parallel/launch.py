"""How ranks find each other: the usual variables, the store, and the process groups of a mesh."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from decoder_svc.parallel.mesh import ParallelMesh
from decoder_svc.parallel.one_shot import one_shot

_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
_DEFAULT_PORT = 29500


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Which host of how many this is, and where they meet. The default is one host alone."""

    host: str = ""
    """Address of the first node, which runs the engine; empty on a single host."""
    port: int = _DEFAULT_PORT
    """Where the engine takes in ranks; the store of the process groups is on the next port."""
    node_rank: int = 0
    num_nodes: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.node_rank < self.num_nodes:
            raise ValueError(f"node rank {self.node_rank} is outside of {self.num_nodes} nodes")
        if self.num_nodes > 1 and not self.host:
            raise ValueError("several nodes need MASTER_ADDR or LWS_LEADER_ADDRESS")

    def local_ranks(self, *, tp_size: int, pp_size: int) -> range:
        """The ranks that this node runs: equally many each, in order.

        Raises:
            ValueError: They do not divide, or a stage would be spread over nodes.
        """
        share, rest = divmod(tp_size * pp_size, self.num_nodes)
        if rest or share % tp_size:
            raise ValueError(
                f"{pp_size} stages of {tp_size} ranks cannot be spread over {self.num_nodes} "
                "nodes: each must hold whole stages, equally many"
            )
        return range(self.node_rank * share, (self.node_rank + 1) * share)


def rendezvous_of(env: Mapping[str, str]) -> Rendezvous:
    """Reads the variables of a LeaderWorkerSet, else MASTER_ADDR, MASTER_PORT, NODE_RANK, NNODES.

    Raises:
        ValueError: Values that make no sense.
    """
    port = _number(env, "MASTER_PORT", _DEFAULT_PORT)
    if env.get("LWS_LEADER_ADDRESS"):
        return _single_if_alone(
            env["LWS_LEADER_ADDRESS"],
            port,
            _number(env, "LWS_WORKER_INDEX", 0),
            _number(env, "LWS_GROUP_SIZE", 1),
        )
    rank, nodes = _number(env, "NODE_RANK", 0), _number(env, "NNODES", 1)
    return _single_if_alone(env.get("MASTER_ADDR", ""), port, rank, nodes)


def _single_if_alone(host: str, port: int, node_rank: int, num_nodes: int) -> Rendezvous:
    if num_nodes == 1:
        return Rendezvous(port=port, node_rank=node_rank)
    return Rendezvous(host=host, port=port, node_rank=node_rank, num_nodes=num_nodes)


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name) or str(default)
    if not text.isdecimal():
        raise ValueError(f"{name} must be a number, got {text!r}")
    return int(text)


def serve_store(rendezvous: Rendezvous) -> Store | None:
    """The store that ranks of several nodes meet in, kept by the engine; None on a single host."""
    if rendezvous.num_nodes == 1:
        return None
    return TCPStore(rendezvous.host, rendezvous.port + 1, is_master=True, wait_for_workers=False)


def join(
    mesh: ParallelMesh,
    group: str,
    *,
    rendezvous: Rendezvous,
    store_path: str,
    device: torch.device,
    dtype: torch.dtype,
    timeout_s: float,
) -> ParallelMesh:
    """Meets all ranks of the mesh in a new group; returns the mesh with its process groups.

    Args:
        mesh: The rank's place.
        group: Names this life of the group: ranks of another never meet these.
        rendezvous: Single host or several.
        store_path: Beginning of the store file's path, on a single host.
        device: Where the rank computes: NCCL on cuda, else gloo.
        dtype: What it computes in.
        timeout_s: Longest that ranks wait for each other.
    """
    timeout = timedelta(seconds=timeout_s)
    world = mesh.tp_size * mesh.pp_size
    store: Store
    if rendezvous.num_nodes == 1:
        os.environ.update({k: v for k, v in _LOOPBACK.items() if k not in os.environ})
        store = FileStore(f"{store_path}-{group}", world)
    else:
        store = TCPStore(rendezvous.host, rendezvous.port + 1, timeout=timeout)
        store = PrefixStore(group, store)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=mesh.rank,
        world_size=world,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    if mesh.pp_size > 1:
        mesh = replace(mesh, return_group=dist.new_group())
    if mesh.tp_size == 1:
        return mesh
    stages = [range(at, at + mesh.tp_size) for at in range(0, world, mesh.tp_size)]
    groups = [dist.new_group(list(stage)) for stage in stages]  # all ranks make all, in order
    own = groups[mesh.pp_rank]
    return replace(mesh, tp_group=own, small_sum=one_shot(own, dtype=dtype, device=device))


def least(value: int, device: torch.device) -> int:
    """The smallest of all ranks' values."""
    shared = torch.tensor([value], device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MIN)
    return int(shared.item())
