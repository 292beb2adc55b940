"""The kernel of `chiasm.kernels.draw`: a program takes a row and reads it again and again."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from chiasm.kernels.draw import Filters

BLOCK, WARPS = 8192, 16


def launch_draw(logits: torch.Tensor, filters: Filters, uniforms: torch.Tensor) -> torch.Tensor:
    """See `chiasm.kernels.draw.draw_tokens`."""
    rows, vocabulary = logits.shape
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _draw[(rows,)](
            logits,
            filters.temperature,
            filters.top_k,
            filters.top_p,
            filters.min_p,
            uniforms,
            ids,
            logits.stride(0),
            vocabulary,
            block=BLOCK,
            num_warps=WARPS,
        )
    return ids


@triton.jit
def _draw(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    uniforms,
    ids,
    stride,
    vocabulary,
    block: tl.constexpr,
):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    heat = tl.load(temperature + row).to(tl.float32)
    k = tl.load(top_k + row).to(tl.int32)
    p = tl.load(top_p + row)
    least_share = tl.load(min_p + row).to(tl.float32)
    top = float("-inf")
    for base in range(0, vocabulary, block):
        top = tl.maximum(top, tl.max(_scaled(logits, base, vocabulary, heat, block), 0))
    # Ids above `edge` stay, and the first `ties` of those at it.
    edge = tl.full((), -2147483648, tl.int32)
    ties = tl.full((), 2147483647, tl.int32)
    mass = tl.full((), 0.0, tl.float64)
    if k > 0:
        edge = _edge_by_count(logits, vocabulary, heat, k, edge, block)
        above, mass, at_edge, weight = _above(logits, vocabulary, heat, top, edge, block)
        ties = k - above
        mass += tl.minimum(ties, at_edge).to(tl.float64) * weight
    if p < 1:
        if k <= 0:
            all_above, mass, all_at, all_weight = _above(logits, vocabulary, heat, top, edge, block)
        wanted = p * mass
        crossing = _edge_by_mass(logits, vocabulary, heat, top, wanted, edge, block)
        num_above, before, num_at, one = _above(logits, vocabulary, heat, top, crossing, block)
        missing = tl.maximum(wanted - before, 0.0) / tl.maximum(one, 1e-300)
        needed = tl.maximum(tl.ceil(tl.minimum(missing, 1e9)).to(tl.int32), 1)
        ties = tl.where(crossing > edge, needed, tl.minimum(ties, needed))
        edge = crossing
    total = tl.full((), 0.0, tl.float64)
    seen = tl.full((), 0, tl.int32)
    for base in range(0, vocabulary, block):
        kept, seen = _kept(
            logits, base, vocabulary, heat, top, edge, ties, seen, least_share, block
        )
        total += tl.sum(kept, 0)
    level = tl.load(uniforms + row) * total
    running = tl.full((), 0.0, tl.float64)
    seen = tl.full((), 0, tl.int32)
    found = tl.full((), 2147483647, tl.int32)
    last = tl.full((), 0, tl.int32)
    for base in range(0, vocabulary, block):
        kept, seen = _kept(
            logits, base, vocabulary, heat, top, edge, ties, seen, least_share, block
        )
        number = base + tl.arange(0, block)
        cumulative = running + tl.cumsum(kept, 0)
        crossed = (cumulative > level) & (kept > 0)
        found = tl.minimum(found, tl.min(tl.where(crossed, number, 2147483647), 0))
        last = tl.maximum(last, tl.max(tl.where(kept > 0, number, 0), 0))
        running += tl.sum(kept, 0)
    tl.store(ids + row, tl.minimum(found, last).to(tl.int64))


@triton.jit
def _scaled(logits, base, vocabulary, heat, block: tl.constexpr):
    """A block of logits over the temperature; what is no number is as in the reference."""
    number = base + tl.arange(0, block)
    value = tl.load(logits + number, mask=number < vocabulary, other=float("-inf")) / heat
    return tl.where(value < float("inf"), value, 0.0)


@triton.jit
def _key(value):
    """An integer that grows with the number, one for each."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # no negative zero
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _middle(low, high):
    """Between the two, above `low` and at most `high`, without overflow."""
    return (low & high) + ((low ^ high) >> 1) + ((low ^ high) & 1)


@triton.jit
def _edge_by_count(logits, vocabulary, heat, k, low, block: tl.constexpr):
    """The largest key that at least k ids reach."""
    high = tl.full((), 2147483647, tl.int32)
    while low < high:
        middle = _middle(low, high)
        count = tl.full((), 0, tl.int32)
        for base in range(0, vocabulary, block):
            inside = base + tl.arange(0, block) < vocabulary
            key = _key(_scaled(logits, base, vocabulary, heat, block))
            count += tl.sum(((key >= middle) & inside).to(tl.int32), 0)
        if count >= k:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _edge_by_mass(logits, vocabulary, heat, top, wanted, low, block: tl.constexpr):
    """The largest key, at least `low`, such that ids that reach it have the mass wanted."""
    high = tl.full((), 2147483647, tl.int32)
    while low < high:
        middle = _middle(low, high)
        mass = tl.full((), 0.0, tl.float64)
        for base in range(0, vocabulary, block):
            value = _scaled(logits, base, vocabulary, heat, block)
            weight = tl.where(_key(value) >= middle, tl.exp(value - top), 0.0)
            mass += tl.sum(weight.to(tl.float64), 0)
        if mass >= wanted:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _above(logits, vocabulary, heat, top, edge, block: tl.constexpr):
    """Ids above the edge and their mass; ids at the edge, and the mass of one of them."""
    count = tl.full((), 0, tl.int32)
    mass = tl.full((), 0.0, tl.float64)
    at_edge = tl.full((), 0, tl.int32)
    weight = tl.full((), 0.0, tl.float32)
    for base in range(0, vocabulary, block):
        inside = base + tl.arange(0, block) < vocabulary
        value = _scaled(logits, base, vocabulary, heat, block)
        key, share = _key(value), tl.exp(value - top)
        higher, equal = (key > edge) & inside, (key == edge) & inside
        count += tl.sum(higher.to(tl.int32), 0)
        mass += tl.sum(tl.where(higher, share, 0.0).to(tl.float64), 0)
        at_edge += tl.sum(equal.to(tl.int32), 0)
        weight = tl.maximum(weight, tl.max(tl.where(equal, share, 0.0), 0))
    return count, mass, at_edge, weight.to(tl.float64)


@triton.jit
def _kept(logits, base, vocabulary, heat, top, edge, ties, seen, least_share, block: tl.constexpr):
    """The mass of each id of a block, 0 for what is left out; ids at the edge seen until then."""
    inside = base + tl.arange(0, block) < vocabulary
    value = _scaled(logits, base, vocabulary, heat, block)
    key, share = _key(value), tl.exp(value - top)
    equal = ((key == edge) & inside).to(tl.int32)
    place = seen + tl.cumsum(equal, 0)
    stays = (key > edge) | ((equal > 0) & (place <= ties))
    stays = stays & inside & (share >= least_share)
    return tl.where(stays, share, 0.0).to(tl.float64), seen + tl.sum(equal, 0)
