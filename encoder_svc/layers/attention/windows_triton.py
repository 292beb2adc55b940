"""Attention of short segments: one program a window and a few heads, nothing written but rows.

The joined projection is read in place, [N, 3, H, D], and turned in registers. A head's D dimensions
are two blocks, D1 a power of two and D2 what is left (80 = 64 + 16): little or nothing is padded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from encoder_svc.layers.attention.base import Segments
from encoder_svc.layers.rotary import Angles

LONGEST = 128
"""Tokens of a segment whose scores still fit one program's registers."""

_SHORT = 64  # what most windows hold; padded to, so that there are two compilations and no more
_LEAST = 16  # of a side of a matrix product
_HEADS_A_PROGRAM = (4, 2, 1)
_STAGES = 3  # the next heads are on their way while one is computed


def split_head(head_dim: int) -> tuple[int, int] | None:
    """Its two blocks, the second padded if need be; None for a head too small for the kernels."""
    first = int(triton.next_power_of_2(head_dim)) // 2
    second = max(_LEAST, int(triton.next_power_of_2(head_dim - first)))
    return (first, second) if first >= _LEAST else None


@triton.jit
def turn_pairs(x, cos, sin, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Turns pairs (2i, 2i + 1) of [ROWS, SIZE] in float32, and returns x's dtype."""
    a, b = tl.split(tl.reshape(x.to(tl.float32), (ROWS, SIZE // 2, 2)))
    turned = tl.join(a * cos - b * sin, b * cos + a * sin)
    return tl.reshape(turned, (ROWS, SIZE)).to(x.dtype)


@triton.jit
def _windows(
    qkv, cos, sin, edges, out, scale,
    HEADS: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    LENGTH: tl.constexpr, PER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    window = tl.program_id(0)
    begin, end = tl.load(edges + window), tl.load(edges + window + 1)
    t = begin + tl.arange(0, LENGTH)
    live = t < end
    a, b = tl.arange(0, D1), D1 + tl.arange(0, D2)
    in_a, in_b = live[:, None], live[:, None] & (b < D)[None, :]
    pair_a, pair_b = tl.arange(0, D1 // 2), D1 // 2 + tl.arange(0, D2 // 2)
    in_pair_b = live[:, None] & (pair_b < D // 2)[None, :]
    row = t[:, None] * (D // 2)
    cos_a = tl.load(cos + row + pair_a[None, :], mask=in_a, other=0.0)
    sin_a = tl.load(sin + row + pair_a[None, :], mask=in_a, other=0.0)
    cos_b = tl.load(cos + row + pair_b[None, :], mask=in_pair_b, other=0.0)
    sin_b = tl.load(sin + row + pair_b[None, :], mask=in_pair_b, other=0.0)
    width: tl.constexpr = HEADS * D
    kind: tl.constexpr = out.dtype.element_ty
    t64 = t.to(tl.int64)[:, None]
    for index in tl.range(0, PER, num_stages=STAGES):
        head = tl.program_id(1) * PER + index
        at_a = qkv + t64 * (3 * width) + head * D + a[None, :]
        at_b = qkv + t64 * (3 * width) + head * D + b[None, :]
        q_a = tl.load(at_a, mask=in_a, other=0.0)
        q_b = tl.load(at_b, mask=in_b, other=0.0)
        k_a = tl.load(at_a + width, mask=in_a, other=0.0)
        k_b = tl.load(at_b + width, mask=in_b, other=0.0)
        v_a = tl.load(at_a + 2 * width, mask=in_a, other=0.0)
        v_b = tl.load(at_b + 2 * width, mask=in_b, other=0.0)
        q_a, k_a = (
            turn_pairs(q_a, cos_a, sin_a, LENGTH, D1),
            turn_pairs(k_a, cos_a, sin_a, LENGTH, D1),
        )
        q_b, k_b = (
            turn_pairs(q_b, cos_b, sin_b, LENGTH, D2),
            turn_pairs(k_b, cos_b, sin_b, LENGTH, D2),
        )
        scores = tl.dot(q_b, tl.trans(k_b), tl.dot(q_a, tl.trans(k_a)))
        scores = tl.where(live[None, :], scores * scale, float("-inf"))
        weights = tl.exp(scores - tl.max(scores, 1)[:, None])
        total = tl.sum(weights, 1)[:, None]
        weights = weights.to(kind)
        o = out + t64 * width + head * D
        tl.store(o + a[None, :], (tl.dot(weights, v_a) / total).to(kind), mask=in_a)
        tl.store(o + b[None, :], (tl.dot(weights, v_b) / total).to(kind), mask=in_b)


def attend_windows(qkv_N3HD: Tensor, angles: Angles, segments: Segments) -> Tensor:
    """Turns and attends; no segment is longer than `LONGEST`. Returns [N, H * D]."""
    tokens, _, heads, head_dim = qkv_N3HD.shape
    blocks = split_head(head_dim)
    assert qkv_N3HD.is_contiguous() and segments.longest <= LONGEST and blocks is not None
    out = torch.empty(tokens, heads * head_dim, dtype=qkv_N3HD.dtype, device=qkv_N3HD.device)
    per = next(number for number in _HEADS_A_PROGRAM if heads % number == 0)
    length = _SHORT if segments.longest <= _SHORT else LONGEST
    _windows[(segments.edges.numel() - 1, heads // per)](
        qkv_N3HD, angles.cos, angles.sin, segments.edges, out, head_dim**-0.5,
        heads, head_dim, *blocks, length, per, _STAGES,
        num_warps=4 if length == _SHORT else 8,
    )  # fmt: skip
    return out
