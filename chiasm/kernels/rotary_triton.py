"""The kernel of `chiasm.kernels.rotary`: one program a token and a few heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from chiasm.kernels.launch import ceil_div, overlapping, power_of_two

HEADS_A_PROGRAM = 4


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
        grid = (tokens, ceil_div(heads + 2 * kv_heads, HEADS_A_PROGRAM))
        # fmt: off
        _rotate_and_store[grid](
            qkv, cos, sin, keys_pool, values_pool, slots, queries,
            qkv.stride(0), *keys_pool.stride()[:3], *values_pool.stride()[:3],
            heads=heads, kv_heads=kv_heads, dim=dim, half=half, page_size=page_size,
            interleaved=interleaved, block_heads=HEADS_A_PROGRAM, block_half=power_of_two(half),
            block_rest=power_of_two(dim - 2 * half) if dim > 2 * half else 0,
            num_warps=2, **overlapping(qkv),
        )
        # fmt: on
    return queries


@triton.jit
def _rotate_and_store(
    qkv,
    cos,
    sin,
    keys_pool,
    values_pool,
    slots,
    queries,
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
    block_half: tl.constexpr,
    block_rest: tl.constexpr,
    early: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    if early:
        gdc_wait()
        gdc_launch_dependents()
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)[:, None]
    slot = tl.load(slots + token).to(tl.int64)
    page, place = slot // page_size, slot % page_size
    is_query = head < heads
    is_key = (head >= heads) & (head < heads + kv_heads) & (slot >= 0)
    is_value = (head >= heads + kv_heads) & (head < heads + 2 * kv_heads) & (slot >= 0)
    source = qkv + token * stride + head * dim
    to_query = queries + token * (heads * dim) + head * dim
    to_key = keys_pool + page * key_page_stride + place * key_place_stride
    to_key += (head - heads) * key_head_stride
    to_value = values_pool + page * value_page_stride + place * value_place_stride
    to_value += (head - heads - kv_heads) * value_head_stride

    index = tl.arange(0, block_half)[None, :]
    inside = index < half
    known = (head < heads + 2 * kv_heads) & inside
    c = tl.load(cos + token * half + index, mask=inside, other=0.0)
    s = tl.load(sin + token * half + index, mask=inside, other=0.0)
    turns = head < heads + kv_heads
    c = tl.where(turns, c, 1.0)
    s = tl.where(turns, s, 0.0)
    if interleaved:
        column = tl.arange(0, 2 * block_half)[None, :]
        wanted = (head < heads + 2 * kv_heads) & (column < 2 * half)
        both = tl.load(source + column, mask=wanted, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (block_heads, block_half, 2)))
        out = tl.join(first * c - second * s, second * c + first * s)
        out = tl.reshape(out, (block_heads, 2 * block_half)).to(queries.dtype.element_ty)
        tl.store(to_query + column, out, mask=wanted & is_query)
        tl.store(to_key + column, out, mask=wanted & is_key)
        tl.store(to_value + column, out, mask=wanted & is_value)
    else:
        first = tl.load(source + index, mask=known, other=0.0).to(tl.float32)
        second = tl.load(source + half + index, mask=known, other=0.0).to(tl.float32)
        low = (first * c - second * s).to(queries.dtype.element_ty)
        high = (second * c + first * s).to(queries.dtype.element_ty)
        tl.store(to_query + index, low, mask=known & is_query)
        tl.store(to_query + half + index, high, mask=known & is_query)
        tl.store(to_key + index, low, mask=known & is_key)
        tl.store(to_key + half + index, high, mask=known & is_key)
        tl.store(to_value + index, low, mask=known & is_value)
        tl.store(to_value + half + index, high, mask=known & is_value)
    if block_rest > 0:
        rest = 2 * half + tl.arange(0, block_rest)[None, :]
        passes = (head < heads + 2 * kv_heads) & (rest < dim)
        kept = tl.load(source + rest, mask=passes, other=0.0)
        tl.store(to_query + rest, kept, mask=passes & is_query)
        tl.store(to_key + rest, kept, mask=passes & is_key)
        tl.store(to_value + rest, kept, mask=passes & is_value)
