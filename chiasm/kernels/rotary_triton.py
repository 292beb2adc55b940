"""The kernel of `chiasm.kernels.rotary`: a few heads of one kind, of some tokens, a program.

A program has queries, keys or values only, so that it stores to one place.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from chiasm.kernels.launch import ceil_div, overlapping, power_of_two

MOST_HEADS, WARPS = 8, 4
MANY = 512
"""From so many tokens on a program takes several: so many programs cost more than their work."""


def launch_rotate_and_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys_pool: torch.Tensor,
    values_pool: torch.Tensor,
    slots: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:
    """See `chiasm.kernels.rotary.rotate_and_store`."""
    _, page_size, kv_heads, dim = keys_pool.shape
    tokens, heads = qkv.shape[0], qkv.shape[1] // dim - 2 * kv_heads
    queries = torch.empty((tokens, heads, dim), dtype=qkv.dtype, device=qkv.device)
    if tokens:
        half = cos.shape[1]
        block_heads = math.gcd(heads, kv_heads, MOST_HEADS)
        block_tokens = 8 if tokens >= MANY else 1
        grid = (ceil_div(tokens, block_tokens), (heads + 2 * kv_heads) // block_heads)
        # fmt: off
        _rotate_and_store[grid](
            qkv, cos, sin, keys_pool, values_pool, slots, queries,
            tokens, qkv.stride(0), *keys_pool.stride()[:3], *values_pool.stride()[:3],
            heads=heads, kv_heads=kv_heads, dim=dim, half=half, page_size=page_size,
            interleaved=interleaved, block_heads=block_heads, block_tokens=block_tokens,
            block_half=power_of_two(half),
            block_rest=power_of_two(dim - 2 * half) if dim > 2 * half else 0,
            num_warps=max(min(block_tokens * block_heads // 2, WARPS), 1), **overlapping(qkv),
        )
        # fmt: on
    return queries


@triton.jit(do_not_specialize=["tokens"])
def _rotate_and_store(
    qkv,
    cos,
    sin,
    keys_pool,
    values_pool,
    slots,
    queries,
    tokens,
    stride,
    key_page_stride,
    key_place_stride,
    key_head_stride,
    value_page_stride,
    value_place_stride,
    value_head_stride,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    half: tl.constexpr,
    page_size: tl.constexpr,
    interleaved: tl.constexpr,
    block_heads: tl.constexpr,
    block_tokens: tl.constexpr,
    block_half: tl.constexpr,
    block_rest: tl.constexpr,
    early: tl.constexpr,
):
    if early:
        gdc_wait()
        gdc_launch_dependents()
    lane = tl.arange(0, block_tokens * block_heads)[:, None]
    token = tl.program_id(0).to(tl.int64) * block_tokens + lane // block_heads
    first_head = tl.program_id(1) * block_heads
    head = lane % block_heads
    source = qkv + token * stride + (first_head + head) * dim
    exists = token < tokens
    slot = tl.load(slots + token, mask=exists, other=-1).to(tl.int64)
    page, place = slot // page_size, slot % page_size
    if first_head < heads:
        target = queries + token * (heads * dim) + (first_head + head) * dim
    elif first_head < heads + kv_heads:
        target = keys_pool + page * key_page_stride + place * key_place_stride
        target += (first_head - heads + head) * key_head_stride
    else:
        target = values_pool + page * value_page_stride + place * value_place_stride
        target += (first_head - heads - kv_heads + head) * value_head_stride
    wanted = exists & ((first_head < heads) | (slot >= 0))
    turns = first_head < heads + kv_heads

    index = tl.arange(0, block_half)[None, :]
    inside = index < half
    c = tl.load(cos + token * half + index, mask=exists & inside & turns, other=1.0)
    s = tl.load(sin + token * half + index, mask=exists & inside & turns, other=0.0)
    if interleaved:
        column = tl.arange(0, 2 * block_half)[None, :]
        real = wanted & (column < 2 * half)
        both = tl.load(source + column, mask=real, other=0.0).to(tl.float32)
        low, high = tl.split(tl.reshape(both, (block_tokens * block_heads, block_half, 2)))
        out = tl.join(low * c - high * s, high * c + low * s)
        out = tl.reshape(out, (block_tokens * block_heads, 2 * block_half))
        tl.store(target + column, out.to(target.dtype.element_ty), mask=real)
    else:
        real = wanted & inside
        low = tl.load(source + index, mask=real, other=0.0).to(tl.float32)
        high = tl.load(source + half + index, mask=real, other=0.0).to(tl.float32)
        tl.store(target + index, (low * c - high * s).to(target.dtype.element_ty), mask=real)
        tl.store(target + half + index, (high * c + low * s).to(target.dtype.element_ty), mask=real)
    if block_rest > 0:
        rest = 2 * half + tl.arange(0, block_rest)[None, :]
        passes = wanted & (rest < dim)
        kept = tl.load(source + rest, mask=passes, other=0.0)
        tl.store(target + rest, kept.to(target.dtype.element_ty), mask=passes)
