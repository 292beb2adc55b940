"""Paged decoding attention in `bench.kernels`: 28 query heads, 4 kv heads of 128, pages of 16."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import torch

from bench.kernels import Entry, copies_of, relative
from chiasm.kernels.paged_decode import (
    Lookup,
    Shape,
    Workspace,
    paged_decode,
    paged_decode_reference,
)

HEADS, KV_HEADS, DIM, PAGE = 28, 4, 128, 16
BATCHES = [(1, 256), (1, 2048), (1, 16384), (32, 256), (128, 256), (128, 2048), (256, 256)]
SWEEP = [
    Shape(tile=64, programs=264, stages=3, warps=4),
    Shape(tile=64, programs=264, stages=5, warps=4),
    Shape(tile=128, programs=264, stages=3, warps=4),
    Shape(tile=32, programs=528, stages=3, warps=4),
    Shape(tile=32, programs=396, stages=5, warps=4),
    Shape(tile=32, programs=528, stages=5, warps=2),
    Shape(tile=32, programs=792, stages=5, warps=1),
    Shape(tile=16, programs=1056, stages=5, warps=1),
]


class Tokens:
    """A pool, and the tables of a batch in it."""

    def __init__(self, lengths: torch.Tensor, copies: int) -> None:
        batch, width = len(lengths), -(-int(lengths.max()) // PAGE)
        make = {"device": "cuda", "dtype": torch.bfloat16}
        self.pools = [
            torch.randn(2, batch * width, PAGE, KV_HEADS, DIM, **make) for _ in range(copies)
        ]
        tables = torch.randperm(batch * width, device="cuda").view(batch, width)
        seats = torch.randperm(batch, device="cuda").int()
        self.lookup = Lookup(tables.int(), seats, lengths.int().cuda())
        self.queries = torch.randn(batch, HEADS, DIM, **make)
        self.workspace = Workspace.allocate(
            batch, HEADS, DIM, torch.device("cuda"), kv_heads=KV_HEADS
        )
        self.out = torch.empty(0)

    def call(self, number: int, shape: Shape | None = None) -> None:
        pool = self.pools[number]
        workspace = replace(self.workspace, shape=shape)
        self.out = paged_decode(self.queries, pool[0], pool[1], self.lookup, DIM**-0.5, workspace)

    def check(self) -> float:
        rows = self.lookup.lengths.nonzero()[:, 0]  # others are left unwritten
        return relative(self.out[rows], self.wanted[rows])

    @functools.cached_property
    def wanted(self) -> torch.Tensor:
        """In float32."""
        keys, values = self.pools[0][0], self.pools[0][1]
        queries = self.queries.float()
        return paged_decode_reference(queries, keys, values, self.lookup, DIM**-0.5)


def entries(sweep: bool) -> Iterator[Entry]:
    for batch, length in BATCHES:
        lengths = torch.full((batch,), length)
        yield from of_lengths(f"attention {batch} x {length}", lengths, sweep)
    ragged = torch.randint(1, 4000, (128,))
    ragged[:8] = torch.randint(8000, 16000, (8,))
    ragged[8:16] = 0
    yield from of_lengths("attention 120 ragged", ragged[torch.randperm(128)], sweep)


def of_lengths(name: str, lengths: torch.Tensor, sweep: bool) -> Iterator[Entry]:
    moved = float(lengths.sum()) * KV_HEADS * DIM * 4 + len(lengths) * HEADS * DIM * 4
    copies = copies_of(moved)
    tokens = Tokens(lengths, copies)
    yield Entry(name, "table", tokens.call, copies, moved, check=tokens.check)
    for shape in SWEEP if sweep else ():
        way = f"tile {shape.tile} x{shape.programs} st{shape.stages} w{shape.warps}"

        def call(number: int, shape: Shape = shape) -> None:
            tokens.call(number, shape)

        yield Entry(name, way, call, copies, moved, check=tokens.check)
    if copies == 2 and len(lengths) == 128:
        yield from flashinfer(name, tokens, moved)


def flashinfer(name: str, tokens: Tokens, moved: float) -> Iterator[Entry]:
    """The same by flashinfer, where it is installed."""
    try:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper
    except ImportError:
        return
    room = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = BatchDecodeWithPagedKVCacheWrapper(room, "NHD", use_tensor_cores=True)
    lookup = tokens.lookup
    pages = (lookup.lengths + PAGE - 1) // PAGE
    starts = torch.zeros(len(pages) + 1, dtype=torch.int32, device="cuda")
    starts[1:] = pages.cumsum(0)
    tables = lookup.block_tables[lookup.seats.long()]
    ids = torch.cat([tables[i, : int(n)] for i, n in enumerate(pages)])
    last = torch.where(lookup.lengths > 0, (lookup.lengths - 1) % PAGE + 1, 0).int()
    wrapper.plan(
        starts, ids, last, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )  # fmt: skip

    def call(number: int) -> None:
        tokens.out = wrapper.run(tokens.queries, (tokens.pools[number][0], tokens.pools[number][1]))

    yield Entry(name, "flashinfer", call, len(tokens.pools), moved, check=tokens.check)
