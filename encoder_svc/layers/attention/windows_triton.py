"""Triton kernels of `fused`. Both read the joined projection in place, [N, 3, H, D].

Shapes: a head's D dimensions are two halves, which rotary pairs; a half is padded to P.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from encoder_svc.layers.attention.base import Segments
from encoder_svc.layers.rotary import Angles

_LEAST = 16  # of a side of a matrix product


@triton.jit
def _windows(
    qkv, cos, sin, edges, out, scale,
    HEADS: tl.constexpr, HALF: tl.constexpr, P: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    window, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(edges + window), tl.load(edges + window + 1)
    t = begin + tl.arange(0, LENGTH)
    h = tl.arange(0, P)
    live = t < end
    inside = live[:, None] & (h < HALF)[None, :]
    width: tl.constexpr = HEADS * HALF * 2
    c = tl.load(cos + t[:, None] * HALF + h[None, :], mask=inside, other=0.0)
    s = tl.load(sin + t[:, None] * HALF + h[None, :], mask=inside, other=0.0)
    q = qkv + t.to(tl.int64)[:, None] * (3 * width) + head * (2 * HALF) + h[None, :]
    k = q + width
    v = k + width
    q1 = tl.load(q, mask=inside, other=0.0)
    q2 = tl.load(q + HALF, mask=inside, other=0.0)
    k1 = tl.load(k, mask=inside, other=0.0)
    k2 = tl.load(k + HALF, mask=inside, other=0.0)
    v1 = tl.load(v, mask=inside, other=0.0)
    v2 = tl.load(v + HALF, mask=inside, other=0.0)
    kind: tl.constexpr = out.dtype.element_ty
    scores = tl.dot((q1 * c - q2 * s).to(kind), tl.trans((k1 * c - k2 * s).to(kind)))
    scores = tl.dot((q2 * c + q1 * s).to(kind), tl.trans((k2 * c + k1 * s).to(kind)), scores)
    scores = tl.where(live[None, :], scores * scale, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, 1)[:, None])
    total = tl.sum(weights, 1)[:, None]
    weights = weights.to(kind)
    o = out + t.to(tl.int64)[:, None] * width + head * (2 * HALF) + h[None, :]
    tl.store(o, (tl.dot(weights, v1) / total).to(kind), mask=inside)
    tl.store(o + HALF, (tl.dot(weights, v2) / total).to(kind), mask=inside)


@triton.jit
def _turn(
    qkv, cos, sin, q, k,
    HEADS: tl.constexpr, HALF: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    head, h = tl.arange(0, ROWS), tl.arange(0, P)
    inside = (head < HEADS)[:, None] & (h < HALF)[None, :]
    width: tl.constexpr = HEADS * HALF * 2
    kind: tl.constexpr = q.dtype.element_ty
    at = head[:, None] * (2 * HALF) + h[None, :]
    c = tl.load(cos + t * HALF + h, mask=h < HALF, other=0.0)[None, :]
    s = tl.load(sin + t * HALF + h, mask=h < HALF, other=0.0)[None, :]
    a = tl.load(qkv + t * 3 * width + at, mask=inside, other=0.0)
    b = tl.load(qkv + t * 3 * width + at + HALF, mask=inside, other=0.0)
    tl.store(q + t * width + at, (a * c - b * s).to(kind), mask=inside)
    tl.store(q + t * width + at + HALF, (b * c + a * s).to(kind), mask=inside)
    a = tl.load(qkv + t * 3 * width + width + at, mask=inside, other=0.0)
    b = tl.load(qkv + t * 3 * width + width + at + HALF, mask=inside, other=0.0)
    tl.store(k + t * width + at, (a * c - b * s).to(kind), mask=inside)
    tl.store(k + t * width + at + HALF, (b * c + a * s).to(kind), mask=inside)


def attend_windows(qkv_N3HD: Tensor, angles: Angles, segments: Segments) -> Tensor:
    """Turns and attends; one program a window and head. Returns [N, H * D]."""
    tokens, _, heads, head_dim = qkv_N3HD.shape
    assert qkv_N3HD.is_contiguous()
    out = torch.empty(tokens, heads * head_dim, dtype=qkv_N3HD.dtype, device=qkv_N3HD.device)
    half = head_dim // 2
    _windows[(segments.edges.numel() - 1, heads)](
        qkv_N3HD, angles.cos, angles.sin, segments.edges, out, head_dim**-0.5,
        heads, half, _padded(half), _padded(segments.longest),
        num_warps=4 if segments.longest <= 64 else 8,
    )  # fmt: skip
    return out


def turn(qkv_N3HD: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
    """Queries and keys by their angles, [N, H, D] each."""
    tokens, _, heads, head_dim = qkv_N3HD.shape
    assert qkv_N3HD.is_contiguous()
    q = torch.empty(tokens, heads, head_dim, dtype=qkv_N3HD.dtype, device=qkv_N3HD.device)
    k = torch.empty_like(q)
    half = head_dim // 2
    _turn[(tokens,)](
        qkv_N3HD, angles.cos, angles.sin, q, k,
        heads, half, triton.next_power_of_2(half), triton.next_power_of_2(heads),
    )  # fmt: skip
    return q, k


def _padded(size: int) -> int:
    return max(_LEAST, int(triton.next_power_of_2(size)))
