"""Attention of long segments: FlashAttention (Dao 2023) for heads that are no power of two.

Libraries pad a head of 80 to 96 or 128; here it is two blocks, 64 + 16, see `windows_triton`. Keys
and values come by the tensor memory accelerator, but for the last block of a segment: what lies
behind it belongs to another picture, whose rows may not even be finite.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from encoder_svc.layers.attention.base import Segments
from encoder_svc.layers.attention.windows_triton import split_head, turn_pairs
from encoder_svc.layers.rotary import Angles

_QUERIES, _KEYS = 128, 64  # of one program, and of one step of it


@triton.jit
def _turn(
    qkv, cos, sin, q, k,
    HEADS: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    head, d, pair = tl.arange(0, ROWS), tl.arange(0, SIZE), tl.arange(0, SIZE // 2)
    inside = (head < HEADS)[:, None] & (d < D)[None, :]
    width: tl.constexpr = HEADS * D
    at = head[:, None] * D + d[None, :]
    c = tl.load(cos + t * (D // 2) + pair, mask=pair < D // 2, other=0.0)[None, :]
    s = tl.load(sin + t * (D // 2) + pair, mask=pair < D // 2, other=0.0)[None, :]
    queries = tl.load(qkv + t * 3 * width + at, mask=inside, other=0.0)
    tl.store(q + t * width + at, turn_pairs(queries, c, s, ROWS, SIZE), mask=inside)
    keys = tl.load(qkv + t * 3 * width + width + at, mask=inside, other=0.0)
    tl.store(k + t * width + at, turn_pairs(keys, c, s, ROWS, SIZE), mask=inside)


@triton.jit
def _step(q_a, q_b, k_a, k_b, v_a, v_b, o_a, o_b, peak, total, scale, live, MASKED: tl.constexpr):
    """One block of keys: scores, running maximum and sum, output so far. Exponents are of two."""
    scores = tl.dot(q_b, tl.trans(k_b), tl.dot(q_a, tl.trans(k_a)))
    if MASKED:
        scores = tl.where(live[None, :], scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - higher[:, None])
    shrink = tl.exp2(peak - higher)
    total = total * shrink + tl.sum(weights, 1)
    weights = weights.to(v_a.dtype)
    o_a = tl.dot(weights, v_a, o_a * shrink[:, None])
    o_b = tl.dot(weights, v_b, o_b * shrink[:, None])
    return o_a, o_b, higher, total


@triton.jit
def _frames(
    q, k, v, some_k_a, some_k_b, some_v_a, some_v_b, edges, out, v_stride, scale,
    HEADS: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    begin, end = tl.load(edges + tl.program_id(2)), tl.load(edges + tl.program_id(2) + 1)
    first = begin + tl.program_id(0) * QUERIES
    if first < end:
        width: tl.constexpr = HEADS * D
        column = tl.program_id(1) * D
        t = first + tl.arange(0, QUERIES)
        a, b = tl.arange(0, D1)[None, :], D1 + tl.arange(0, D2)[None, :]
        in_a, in_b = (t < end)[:, None], (t < end)[:, None] & (b < D)
        at = t.to(tl.int64)[:, None] * width + column
        q_a = tl.load(q + at + a, mask=in_a, other=0.0)
        q_b = tl.load(q + at + b, mask=in_b, other=0.0)
        o_a, o_b = tl.zeros([QUERIES, D1], tl.float32), tl.zeros([QUERIES, D2], tl.float32)
        peak, total = tl.full([QUERIES], float("-inf"), tl.float32), tl.zeros([QUERIES], tl.float32)
        key = tl.arange(0, KEYS)
        whole = begin + (end - begin) // KEYS * KEYS
        for n in range(begin, whole, KEYS):
            k_a, k_b = some_k_a.load([n, column]), some_k_b.load([n, column + D1])
            v_a, v_b = some_v_a.load([n, column]), some_v_b.load([n, column + D1])
            o_a, o_b, peak, total = _step(
                q_a, q_b, k_a, k_b, v_a, v_b, o_a, o_b, peak, total, scale, key < KEYS, False
            )
        if whole < end:
            live = whole + key < end
            row = (whole + key).to(tl.int64)[:, None]
            rest_a, rest_b = live[:, None], live[:, None] & (b < D)
            k_a = tl.load(k + row * width + column + a, mask=rest_a, other=0.0)
            k_b = tl.load(k + row * width + column + b, mask=rest_b, other=0.0)
            v_a = tl.load(v + row * v_stride + column + a, mask=rest_a, other=0.0)
            v_b = tl.load(v + row * v_stride + column + b, mask=rest_b, other=0.0)
            o_a, o_b, peak, total = _step(
                q_a, q_b, k_a, k_b, v_a, v_b, o_a, o_b, peak, total, scale, live, True
            )
        tl.store(out + at + a, (o_a / total[:, None]).to(out.dtype.element_ty), mask=in_a)
        tl.store(out + at + b, (o_b / total[:, None]).to(out.dtype.element_ty), mask=in_b)


def attend_frames(qkv_N3HD: Tensor, angles: Angles, segments: Segments) -> Tensor:
    """Turns, once, and attends; segments of any length. Returns [N, H * D]."""
    tokens, _, heads, head_dim = qkv_N3HD.shape
    blocks = split_head(head_dim)
    assert qkv_N3HD.is_contiguous() and blocks is not None
    width = heads * head_dim
    q, k = _turned(qkv_N3HD, angles)
    v = qkv_N3HD.flatten(1)[:, 2 * width :]
    some = [
        TensorDescriptor.from_tensor(tensor, [_KEYS, size]) for tensor in (k, v) for size in blocks
    ]
    out = torch.empty_like(q)
    grid = (triton.cdiv(segments.longest, _QUERIES), heads, segments.edges.numel() - 1)
    _frames[grid](
        q, k, v, *some, segments.edges, out, v.stride(0), head_dim**-0.5 * 1.4426950408889634,
        heads, head_dim, *blocks, _QUERIES, _KEYS,
        num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


def _turned(qkv_N3HD: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
    """Queries and keys by their angles, [N, H * D] each."""
    tokens, _, heads, head_dim = qkv_N3HD.shape
    q = torch.empty(tokens, heads * head_dim, dtype=qkv_N3HD.dtype, device=qkv_N3HD.device)
    k = torch.empty_like(q)
    _turn[(tokens,)](
        qkv_N3HD, angles.cos, angles.sin, q, k,
        heads, head_dim, triton.next_power_of_2(head_dim), triton.next_power_of_2(heads),
    )  # fmt: skip
    return q, k
