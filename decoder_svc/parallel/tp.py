"""Collectives among tensor-parallel peers. At size 1 they hand their argument back untouched."""

from __future__ import annotations

import torch
import torch.distributed as dist

from decoder_svc.parallel.mesh import ParallelMesh


def all_reduce(partial: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor:
    """The sum over ranks; may be written over the partial one."""
    if mesh.tp_size == 1:
        return partial
    if mesh.small_sum is not None and mesh.small_sum.fits(partial):
        return mesh.small_sum(partial)
    dist.all_reduce(partial, group=mesh.tp_group)
    return partial


def all_gather_features(local: torch.Tensor, mesh: ParallelMesh) -> torch.Tensor:
    """[..., local] of every rank side by side, [..., local x tp_size]."""
    if mesh.tp_size == 1:
        return local
    parts = [torch.empty_like(local) for _ in range(mesh.tp_size)]
    dist.all_gather(parts, local.contiguous(), group=mesh.tp_group)
    return torch.cat(parts, dim=-1)
