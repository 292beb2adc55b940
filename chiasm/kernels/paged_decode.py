"""Attention of one new token per sequence over keys and values in pages: split-KV flash decoding.

The tiles of all sequences (`TILE` tokens of one kv head) form one line that a fixed number of
programs cuts into equal shares (the stream-K idea of Osama et al., 2023, applied to attention), so
any mix of lengths fills the GPU. Programs find their share by themselves from the lengths on the
device: a captured CUDA graph serves other lengths and tables on replay. Where a sequence is cut,
the program that finishes last joins the parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chiasm.kernels.language import Pointer, Scalar, compiled, constexpr, jit, power_of_two, tl

LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Lookup:
    """Where the tokens of a batch lie. B rows, of which some may be padding."""

    block_tables: torch.Tensor
    """[seats, P] int32: page ids of each seat's tokens in order."""
    seats: torch.Tensor
    """[B] int32: the row of `block_tables` to use."""
    lengths: torch.Tensor
    """[B] int32: tokens to look at, the current one included; 0 is padding."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How the kernel is cut; one table entry per kind of batch."""

    tile: int
    """Tokens a step of the inner loop takes."""
    programs: int
    """Programs, all kv heads together."""
    stages: int
    """Steps whose loads are under way at once."""
    warps: int


@dataclass(frozen=True, slots=True)
class Workspace:
    """Room for parts of sequences; one per device and stream, reused by all layers."""

    parts: torch.Tensor
    """float32: values, maxima and sums of the parts."""
    arrived: torch.Tensor
    """[rows x kv heads] int32: parts that have arrived. Zero between calls."""

    @classmethod
    def allocate(
        cls, max_batch: int, heads: int, dim: int, device: torch.device, kv_heads: int = 1
    ) -> Workspace:
        """Room for batches of up to `max_batch` rows of `heads` query heads."""
        group = power_of_two(max(heads // kv_heads, 16))
        room = 2 * MAX_PROGRAMS * group * (power_of_two(dim) + 2)
        return cls(
            parts=torch.empty(room, dtype=torch.float32, device=device),
            arrived=torch.zeros(max_batch * heads, dtype=torch.int32, device=device),
        )


MAX_PROGRAMS = 1056


def shape_for(batch: int, longest: int) -> Shape:
    """The measured best for batches of so many rows of at most `longest` tokens each."""
    del longest
    if batch <= 4:
        return Shape(tile=32, programs=264, stages=3, warps=4)
    return Shape(tile=64, programs=264, stages=3, warps=4)


def paged_decode(
    queries: torch.Tensor,
    keys_pool: torch.Tensor,
    values_pool: torch.Tensor,
    lookup: Lookup,
    scale: float,
    workspace: Workspace,
    shape: Shape | None = None,
) -> torch.Tensor:
    """Queries [B, heads, dim] to [B, heads, dim]; rows of length 0 are left unwritten.

    Pools [pages, page_size, kv_heads, dim] of any strides but the last. Everything that varies from
    step to step (lengths, tables, seats) is read on the device.
    """
    if not compiled(queries):
        return paged_decode_reference(queries, keys_pool, values_pool, lookup, scale)
    batch, heads, dim = queries.shape
    page_size, kv_heads = keys_pool.shape[1:3]
    group = heads // kv_heads
    shape = shape or shape_for(batch, lookup.block_tables.shape[1] * page_size)
    out = torch.empty((batch, heads, dim), dtype=queries.dtype, device=queries.device)
    if not batch:
        return out
    grid = (kv_heads, max(shape.programs // kv_heads, 1))
    # fmt: off
    _paged_decode[grid](
        queries, keys_pool, values_pool,
        lookup.block_tables, lookup.seats, lookup.lengths, out,
        workspace.parts, workspace.arrived, scale * LOG2E, batch,
        *queries.stride()[:2], *keys_pool.stride()[:3], *values_pool.stride()[:3],
        lookup.block_tables.stride(0),
        group=group, dim=dim, page_size=page_size,
        block_group=max(power_of_two(group), 16), block_dim=max(power_of_two(dim), 16),
        block_batch=power_of_two(batch), tile=shape.tile, stages=shape.stages,
        num_warps=shape.warps,
    )
    # fmt: on
    return out


def paged_decode_reference(
    queries: torch.Tensor,
    keys_pool: torch.Tensor,
    values_pool: torch.Tensor,
    lookup: Lookup,
    scale: float,
) -> torch.Tensor:
    """`paged_decode` in plain torch; rows of length 0 are zero."""
    out = torch.zeros_like(queries)
    group = queries.shape[1] // keys_pool.shape[2]
    page_size = keys_pool.shape[1]
    for row, length in enumerate(lookup.lengths.tolist()):
        if length == 0:
            continue
        num_pages = -(-length // page_size)
        pages = lookup.block_tables[lookup.seats[row].long(), :num_pages].long()
        keys = keys_pool[pages].flatten(0, 1)[:length].float()
        values = values_pool[pages].flatten(0, 1)[:length].float()
        keys, values = (t.repeat_interleave(group, dim=1) for t in (keys, values))
        weights = torch.einsum("hd,nhd->hn", queries[row].float(), keys).mul(scale).softmax(-1)
        out[row] = torch.einsum("hn,nhd->hd", weights, values).to(queries.dtype)
    return out


@jit
def _paged_decode(
    queries: Pointer,
    keys_pool: Pointer,
    values_pool: Pointer,
    block_tables: Pointer,
    seats: Pointer,
    lengths: Pointer,
    out: Pointer,
    parts: Pointer,
    arrived: Pointer,
    scale: Scalar,
    batch: Scalar,
    query_stride: Scalar,
    query_head_stride: Scalar,
    key_page_stride: Scalar,
    key_place_stride: Scalar,
    key_head_stride: Scalar,
    value_page_stride: Scalar,
    value_place_stride: Scalar,
    value_head_stride: Scalar,
    table_stride: Scalar,
    group: constexpr,
    dim: constexpr,
    page_size: constexpr,
    block_group: constexpr,
    block_dim: constexpr,
    block_batch: constexpr,
    tile: constexpr,
    stages: constexpr,
) -> None:
    """One share: a run of tiles of one kv head, which may end one sequence and begin others."""
    kv_head, program = tl.program_id(0), tl.program_id(1)
    kv_heads, programs = tl.num_programs(0), tl.num_programs(1)
    rows = tl.arange(0, block_batch)
    row_lengths = tl.load(lengths + rows, mask=rows < batch, other=0)
    row_tiles = (row_lengths + tile - 1) // tile
    row_ends = tl.cumsum(row_tiles, 0)
    total = tl.sum(row_tiles, 0)
    share = (total + programs - 1) // programs
    begin = program * share
    unit = begin
    end = tl.minimum(begin + share, total)
    member = tl.arange(0, block_group)
    column = tl.arange(0, block_dim)
    real = (member < group)[:, None] & (column < dim)[None, :]
    part_size = block_group * (block_dim + 2)
    in_part = member[:, None] * block_dim + column[None, :]
    while unit < end:
        row = tl.sum((row_ends <= unit).to(tl.int32), 0)
        row_begin = tl.sum(tl.where(rows < row, row_tiles, 0), 0)
        length = tl.load(lengths + row)
        row_end = row_begin + (length + tile - 1) // tile
        stop = tl.minimum(row_end, end)
        table = block_tables + tl.load(seats + row).to(tl.int64) * table_stride
        head = kv_head * group + member
        place = row * query_stride + head[:, None] * query_head_stride + column[None, :]
        query = tl.load(queries + place, mask=real, other=0.0)
        top = tl.full((block_group,), float("-inf"), tl.float32)
        weight = tl.zeros((block_group,), tl.float32)
        value = tl.zeros((block_group, block_dim), tl.float32)
        for step in tl.range(unit - row_begin, stop - row_begin, num_stages=stages):
            token = step * tile + tl.arange(0, tile)
            there = token < length
            page = tl.load(table + token // page_size, mask=there, other=0).to(tl.int64)
            within = token % page_size
            key_base = page * key_page_stride + within * key_place_stride
            value_base = page * value_page_stride + within * value_place_stride
            wanted = there[:, None] & (column < dim)[None, :]
            k = tl.load(
                keys_pool + key_base[:, None] + kv_head * key_head_stride + column[None, :],
                mask=wanted,
                other=0.0,
            )
            scores = tl.dot(query, tl.trans(k)) * scale
            scores = tl.where(there[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            fade = tl.exp2(top - new_top)
            p = tl.exp2(scores - new_top[:, None])
            v = tl.load(
                values_pool + value_base[:, None] + kv_head * value_head_stride + column[None, :],
                mask=wanted,
                other=0.0,
            )
            weight = weight * fade + tl.sum(p, 1)
            value = tl.dot(p.to(v.dtype), v, value * fade[:, None])
            top = new_top
        target = out + (row * kv_heads * group + head[:, None]) * dim + column[None, :]
        if (unit == row_begin) & (stop == row_end):
            tl.store(target, value / weight[:, None], mask=real)
        else:
            number = program * 2 + (unit != begin).to(tl.int32)
            part = parts + (number * kv_heads + kv_head).to(tl.int64) * part_size
            tl.store(part + in_part, value)
            tl.store(part + block_group * block_dim + member, top)
            tl.store(part + block_group * (block_dim + 1) + member, weight)
            tl.debug_barrier()
            first = row_begin // share
            num_parts = (row_end - 1) // share - first + 1
            counter = arrived + row * kv_heads + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == num_parts - 1:
                tl.store(counter, 0)
                top = tl.full((block_group,), float("-inf"), tl.float32)
                weight = tl.zeros((block_group,), tl.float32)
                value = tl.zeros((block_group, block_dim), tl.float32)
                for other in tl.range(first, first + num_parts):
                    late = ((other == first) & (row_begin != first * share)).to(tl.int32)
                    part = (
                        parts + ((other * 2 + late) * kv_heads + kv_head).to(tl.int64) * part_size
                    )
                    its_top = tl.load(part + block_group * block_dim + member, cache_modifier=".cg")
                    its_weight = tl.load(
                        part + block_group * (block_dim + 1) + member, cache_modifier=".cg"
                    )
                    its_value = tl.load(part + in_part, cache_modifier=".cg")
                    new_top = tl.maximum(top, its_top)
                    fade, grow = tl.exp2(top - new_top), tl.exp2(its_top - new_top)
                    weight = weight * fade + its_weight * grow
                    value = value * fade[:, None] + its_value * grow[:, None]
                    top = new_top
                tl.store(target, value / weight[:, None], mask=real)
        unit = stop
