"""The kernel of `chiasm.kernels.paged_decode`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from chiasm.kernels.launch import overlapping, power_of_two
from chiasm.kernels.paged_decode import Lookup, Workspace, shape_for

LOG2E = 1.4426950408889634


def launch_paged_decode(
    queries: torch.Tensor,
    keys_pool: torch.Tensor,
    values_pool: torch.Tensor,
    lookup: Lookup,
    scale: float,
    workspace: Workspace,
    out: torch.Tensor,
) -> torch.Tensor:
    """See `chiasm.kernels.paged_decode.paged_decode`."""
    batch, heads, dim = queries.shape
    page_size, kv_heads = keys_pool.shape[1:3]
    group = heads // kv_heads
    if not batch:
        return out
    shape = workspace.shape or shape_for(batch)
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
        abreast=min(shape.warps, 4),
        num_warps=shape.warps, **overlapping(queries),
    )
    # fmt: on
    return out


@triton.jit(do_not_specialize=["batch"])
def _paged_decode(
    queries,
    keys_pool,
    values_pool,
    block_tables,
    seats,
    lengths,
    out,
    parts,
    arrived,
    scale,
    batch,
    query_stride,
    query_head_stride,
    key_page_stride,
    key_place_stride,
    key_head_stride,
    value_page_stride,
    value_place_stride,
    value_head_stride,
    table_stride,
    group: tl.constexpr,
    dim: tl.constexpr,
    page_size: tl.constexpr,
    block_group: tl.constexpr,
    block_dim: tl.constexpr,
    block_batch: tl.constexpr,
    tile: tl.constexpr,
    stages: tl.constexpr,
    abreast: tl.constexpr,
    early: tl.constexpr,
):
    """One share: a run of tiles of one kv head, which may end one sequence and begin others."""
    kv_head, program = tl.program_id(0), tl.program_id(1)
    kv_heads, programs = tl.num_programs(0), tl.num_programs(1)
    if early:
        gdc_wait()
        gdc_launch_dependents()
    rows = tl.arange(0, block_batch)
    row_lengths = tl.load(lengths + rows, mask=rows < batch, other=0)
    row_seats = tl.load(seats + rows, mask=rows < batch, other=0)
    row_tiles = (row_lengths + tile - 1) // tile
    row_ends = tl.cumsum(row_tiles, 0)
    total = tl.sum(row_tiles, 0)
    # Joining a part costs about as much as two tiles: few programs a sequence where few would do.
    least = tl.sqrt(tl.max(row_tiles, 0).to(tl.float32) * 0.5).to(tl.int32)
    share = tl.maximum((total + programs - 1) // programs, tl.maximum(least, 1))
    begin = program * share
    unit = begin
    end = tl.minimum(begin + share, total)
    member = tl.arange(0, block_group)
    column = tl.arange(0, block_dim)
    real = (member < group)[:, None] & (column < dim)[None, :]
    part_size = block_group * (block_dim + 2)
    while unit < end:
        row = tl.sum((row_ends <= unit).to(tl.int32), 0)
        row_begin = tl.sum(tl.where(rows < row, row_tiles, 0), 0)
        length = tl.sum(tl.where(rows == row, row_lengths, 0), 0)
        seat = tl.sum(tl.where(rows == row, row_seats, 0), 0)
        row_end = row_begin + (length + tile - 1) // tile
        stop = tl.minimum(row_end, end)
        table = block_tables + seat.to(tl.int64) * table_stride
        head = kv_head * group + member
        place = row * query_stride + head[:, None] * query_head_stride + column[None, :]
        query = tl.load(queries + place, mask=real, other=0.0)
        # fmt: off
        value, top, weight = _attend(
            query, keys_pool, values_pool, table, length, unit - row_begin, stop - row_begin, scale,
            key_page_stride, key_place_stride, key_head_stride,
            value_page_stride, value_place_stride, value_head_stride,
            dim, page_size, block_group, block_dim, tile, stages,
        )
        # fmt: on
        target = out + (row * kv_heads * group + head[:, None]) * dim + column[None, :]
        if (unit == row_begin) & (stop == row_end):
            tl.store(target, value / weight[:, None], mask=real)
        else:
            number = program * 2 + (unit != begin).to(tl.int32)
            part = parts + (number * kv_heads + kv_head).to(tl.int64) * part_size
            _leave(part, value, top, weight, real, block_group, block_dim)
            first = row_begin // share
            num_parts = (row_end - 1) // share - first + 1
            counter = arrived + row * kv_heads + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == num_parts - 1:
                tl.store(counter, 0)
                cut = row_begin != first * share
                value, weight = _join(
                    parts, first, num_parts, cut, dim, group, block_group, block_dim, abreast
                )
                tl.store(target, value / weight[:, None], mask=real)
        unit = stop


@triton.jit
def _attend(
    query,
    keys_pool,
    values_pool,
    table,
    length,
    begin,
    end,
    scale,
    key_page_stride,
    key_place_stride,
    key_head_stride,
    value_page_stride,
    value_place_stride,
    value_head_stride,
    dim: tl.constexpr,
    page_size: tl.constexpr,
    block_group: tl.constexpr,
    block_dim: tl.constexpr,
    tile: tl.constexpr,
    stages: tl.constexpr,
):
    """Tiles [begin, end) of a sequence: values weighed, the largest score, the sum of weights."""
    kv_head = tl.program_id(0)
    column = tl.arange(0, block_dim)
    top = tl.full((block_group,), float("-inf"), tl.float32)
    weight = tl.zeros((block_group,), tl.float32)
    value = tl.zeros((block_group, block_dim), tl.float32)
    for step in tl.range(begin, end, num_stages=stages):
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
    return value, top, weight


@triton.jit
def _leave(part, value, top, weight, real, block_group: tl.constexpr, block_dim: tl.constexpr):
    """Puts a part where whoever arrives last finds it."""
    member = tl.arange(0, block_group)
    column = tl.arange(0, block_dim)
    tl.store(part + member[:, None] * block_dim + column[None, :], value, mask=real)
    tl.store(part + block_group * block_dim + member, top)
    tl.store(part + block_group * (block_dim + 1) + member, weight)
    tl.debug_barrier()


@triton.jit
def _join(
    parts,
    first,
    num_parts,
    cut,
    dim: tl.constexpr,
    group: tl.constexpr,
    block_group: tl.constexpr,
    block_dim: tl.constexpr,
    abreast: tl.constexpr,
):
    """The parts of a sequence, of programs `first` and on; `cut`: the first had others before."""
    kv_head, kv_heads = tl.program_id(0), tl.num_programs(0)
    member = tl.arange(0, block_group)
    column = tl.arange(0, block_dim)
    real = (member < group)[:, None] & (column < dim)[None, :]
    part_size = block_group * (block_dim + 2)
    in_part = member[:, None] * block_dim + column[None, :]
    top = tl.full((block_group,), float("-inf"), tl.float32)
    weight = tl.zeros((block_group,), tl.float32)
    value = tl.zeros((block_group, block_dim), tl.float32)
    for base in tl.range(first, first + num_parts, abreast):
        for other in tl.static_range(abreast):
            program = base + other
            known = program < first + num_parts
            number = program * 2 + ((program == first) & cut).to(tl.int32)
            part = parts + (number * kv_heads + kv_head).to(tl.int64) * part_size
            sums = part + block_group * block_dim + member
            its_top = tl.load(sums, mask=known, other=float("-inf"), cache_modifier=".cg")
            its_weight = tl.load(sums + block_group, mask=known, other=0.0, cache_modifier=".cg")
            its_value = tl.load(part + in_part, mask=real & known, other=0.0, cache_modifier=".cg")
            new_top = tl.maximum(top, its_top)
            fade, grow = tl.exp2(top - new_top), tl.exp2(its_top - new_top)
            weight = weight * fade + its_weight * grow
            value = value * fade[:, None] + its_value * grow[:, None]
            top = new_top
    return value, weight
