"""Which attention backend a rank uses."""

from __future__ import annotations

import importlib.util

import torch

from decoder_svc.attention.base import AttentionBackend
from decoder_svc.attention.flashinfer import FlashInferAttention
from decoder_svc.attention.reference import ReferenceAttention
from decoder_svc.config.from_hf import TextConfig
from decoder_svc.kv_cache.pool import KVPool
from decoder_svc.parallel.mesh import ParallelMesh
from decoder_svc.runner.seats import SeatTable

_HEAD_DIMS = (64, 128, 256)


def build_attention(
    name: str, pool: KVPool, seats: SeatTable, *, text: TextConfig, mesh: ParallelMesh
) -> AttentionBackend:
    """The backend of that name; `auto` takes flashinfer where it can run.

    Raises:
        ValueError: flashinfer was asked for by name and cannot run.
    """
    hindrance = _hindrance(pool)
    if name == "reference" or (name == "auto" and hindrance):
        return ReferenceAttention(pool)
    if hindrance:
        raise ValueError(f"--attention-backend flashinfer: {hindrance}")
    heads = len(mesh.split(text.num_heads, what="attention heads"))
    return FlashInferAttention(pool, num_heads=heads, tables=seats.tables)


def _hindrance(pool: KVPool) -> str:
    """Why flashinfer cannot run, or nothing."""
    if pool.keys.device.type != "cuda":
        return "it needs a CUDA device"
    if pool.keys.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, not {pool.keys.dtype}"
    if pool.keys.shape[-1] not in _HEAD_DIMS:
        return f"no kernel for heads of {pool.keys.shape[-1]} features"
    for package in ("flashinfer", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    return ""
