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


def wants_flashinfer(name: str, weight: torch.Tensor, *, head_dim: int) -> bool:
    """Whether the backend of that name is flashinfer; `auto` takes it where it can run.

    Args:
        name: auto, flashinfer or reference.
        weight: One of the model's, for its device and dtype.
        head_dim: Features of a head.

    Raises:
        ValueError: flashinfer was asked for by name and cannot run.
    """
    if name == "reference":
        return False
    hindrance = _hindrance(weight, head_dim)
    if hindrance and name == "flashinfer":
        raise ValueError(f"--attention-backend flashinfer: {hindrance}")
    return not hindrance


def build_attention(
    pool: KVPool, seats: SeatTable, *, text: TextConfig, mesh: ParallelMesh
) -> AttentionBackend:
    """The backend for pages as they are stored: head by head is flashinfer's way."""
    if not pool.heads_first:
        return ReferenceAttention(pool)
    heads = len(mesh.split(text.num_heads, what="attention heads"))
    return FlashInferAttention(pool, num_heads=heads, tables=seats.tables)


def _hindrance(weight: torch.Tensor, head_dim: int) -> str:
    """Why flashinfer cannot run, or nothing."""
    if weight.device.type != "cuda":
        return "it needs a CUDA device"
    if weight.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, not {weight.dtype}"
    if head_dim not in _HEAD_DIMS:
        return f"no kernel for heads of {head_dim} features"
    for package in ("flashinfer", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    return ""
