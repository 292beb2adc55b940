"""Attention of one new token per sequence over keys and values in pages: split-KV flash decoding.

The tiles of all sequences (`Shape.tile` tokens of one kv head) form one line that programs cut into
equal shares (stream-K, Osama et al. 2023, applied to attention): any mix of lengths fills the GPU.
Shares follow from lengths on the device, so a captured CUDA graph serves others on replay. Where a
sequence is cut, the program that finishes last joins the parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chiasm.kernels.launch import compiled, power_of_two


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
    shape: Shape | None = None
    """Another cut than the measured best, for measuring."""

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


def shape_for(batch: int) -> Shape:
    """The measured best for batches of so many rows."""
    if batch <= 8:
        return Shape(tile=32, programs=396, stages=5, warps=4)
    return Shape(tile=32, programs=528, stages=5, warps=2)


def paged_decode(
    queries: torch.Tensor,
    keys_pool: torch.Tensor,
    values_pool: torch.Tensor,
    lookup: Lookup,
    scale: float,
    workspace: Workspace,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Queries [B, heads, dim] to [B, heads, dim]; rows of length 0 are left unwritten.

    Pools [pages, page_size, kv_heads, dim] of bfloat16 or float16, of any strides but the
    last. What varies from step to step (lengths, tables, seats) is read on the device. `out` is
    where to write, contiguous; None = anew.
    """
    if out is None:
        out = torch.empty_like(queries, memory_format=torch.contiguous_format)
    if not compiled(queries):
        found = paged_decode_reference(queries, keys_pool, values_pool, lookup, scale)
        return out.copy_(found)
    from chiasm.kernels.paged_decode_triton import launch_paged_decode

    return launch_paged_decode(queries, keys_pool, values_pool, lookup, scale, workspace, out)


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
