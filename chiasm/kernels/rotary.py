"""Rotary embedding of queries and keys, and the writing of keys and values into their pages.

One pass over the output of the QKV projection: queries go to a tensor of their own, keys and values
straight to the pages.
"""

from __future__ import annotations

import torch

from chiasm.kernels.language import (
    Pointer,
    Scalar,
    ceil_div,
    compiled,
    constexpr,
    jit,
    power_of_two,
    tl,
)

HEADS_A_PROGRAM = 4


def rotate_and_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys_pool: torch.Tensor,
    values_pool: torch.Tensor,
    slots: torch.Tensor,
    interleaved: bool = False,
) -> torch.Tensor:
    """Returns the turned queries [T, heads, dim]; writes turned keys, and values, at their slots.

    qkv [T, (heads + 2 kv_heads) dim], contiguous in a row; keeps its values. cos, sin
    [T, rot / 2] float32, contiguous: the first `rot` of `dim` elements turn, the rest pass. Pools
    [pages, page_size, kv_heads, dim], of any strides but the last; kv_heads, dim and page_size are
    read from them, heads from the width of qkv. slots [T] int32 or int64: page x page_size + place;
    a negative slot is padding: nothing is written. `interleaved` turns the pairs (2i, 2i + 1),
    otherwise (i, i + rot / 2).
    """
    if not compiled(qkv):
        return rotate_and_store_reference(qkv, cos, sin, keys_pool, values_pool, slots, interleaved)
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
            num_warps=2,
        )
        # fmt: on
    return queries


def rotate_and_store_reference(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys_pool: torch.Tensor,
    values_pool: torch.Tensor,
    slots: torch.Tensor,
    interleaved: bool = False,
) -> torch.Tensor:
    """`rotate_and_store` in plain torch."""
    _, page_size, kv_heads, dim = keys_pool.shape
    per_head = qkv.unflatten(1, (qkv.shape[1] // dim, dim))
    heads = per_head.shape[1] - 2 * kv_heads
    queries, keys, values = per_head.split((heads, kv_heads, kv_heads), dim=1)
    kept = (slots >= 0).nonzero()[:, 0]
    where = slots[kept].long()
    place = (where // page_size, where % page_size)
    keys_pool[place] = turn(keys, cos, sin, interleaved)[kept].to(keys_pool.dtype)
    values_pool[place] = values[kept].to(values_pool.dtype)
    return turn(queries, cos, sin, interleaved)


def turn(
    heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Turns [T, heads, dim] by the angles [T, rot / 2], in float32, rounded once."""
    half = cos.shape[1]
    turned, rest = heads[..., : 2 * half].float(), heads[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    pair = (first * cos - second * sin, second * cos + first * sin)
    out = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((out.to(heads.dtype), rest), dim=-1)


@jit
def _rotate_and_store(
    qkv: Pointer,
    cos: Pointer,
    sin: Pointer,
    keys_pool: Pointer,
    values_pool: Pointer,
    slots: Pointer,
    queries: Pointer,
    stride: Scalar,
    key_page_stride: Scalar,
    key_place_stride: Scalar,
    key_head_stride: Scalar,
    value_page_stride: Scalar,
    value_place_stride: Scalar,
    value_head_stride: Scalar,
    heads: constexpr,
    kv_heads: constexpr,
    dim: constexpr,
    half: constexpr,
    page_size: constexpr,
    interleaved: constexpr,
    block_heads: constexpr,
    block_half: constexpr,
    block_rest: constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
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
