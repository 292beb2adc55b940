"""Rotary embedding of queries and keys, and the writing of keys and values into their pages.

One pass over the output of the QKV projection: queries go to a tensor of their own, keys and values
straight to the pages.
"""

from __future__ import annotations

import torch

from chiasm.kernels.launch import compiled


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
    from chiasm.kernels.rotary_triton import launch_rotate_and_store

    return launch_rotate_and_store(qkv, cos, sin, keys_pool, values_pool, slots, interleaved)


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
