"""The kernels of `chiasm.kernels.argmax`: one over parts of rows, one that joins them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from chiasm.kernels.launch import ceil_div, overlapping

BLOCK, WARPS = 2048, 4
PROGRAMS = 1320
"""Ten for each of 132 multiprocessors."""
MOST_PARTS = 1024
"""Parts of one row that can be joined; a constant, so that nothing is compiled for a batch size."""


def launch_greedy(
    logits: torch.Tensor, masked_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `chiasm.kernels.argmax.greedy`."""
    batch, vocabulary = logits.shape
    device = logits.device
    parts = min(ceil_div(PROGRAMS, max(batch, 1)), ceil_div(vocabulary, BLOCK))
    steps = ceil_div(ceil_div(vocabulary, parts), BLOCK)
    parts = ceil_div(vocabulary, steps * BLOCK)
    best = torch.empty((batch, parts), dtype=torch.float32, device=device)
    best_id = torch.empty((batch, parts), dtype=torch.int32, device=device)
    ids = torch.empty(batch, dtype=torch.int64, device=device)
    largest = torch.empty(batch, dtype=torch.float32, device=device)
    sound = torch.empty(batch, dtype=torch.bool, device=device)
    if batch:
        _greedy_parts[(parts, batch)](
            logits,
            masked_ids,
            best,
            best_id,
            logits.stride(0),
            vocabulary,
            steps,
            num_masked=masked_ids.shape[0],
            block=BLOCK,
            num_warps=WARPS,
            **overlapping(logits),
        )
        _greedy_join[(batch,)](
            best,
            best_id,
            ids,
            largest,
            sound,
            parts,
            block=MOST_PARTS,
            num_warps=1,
            **overlapping(logits),
        )
    return ids, largest, sound


@triton.jit(do_not_specialize=["steps"])
def _greedy_parts(
    logits,
    masked_ids,
    best,
    best_id,
    stride,
    vocabulary,
    steps,
    num_masked: tl.constexpr,
    block: tl.constexpr,
    early: tl.constexpr,
):
    """The best of a part, `steps` blocks of the row; id -1 says: not sound."""
    part, row = tl.program_id(0), tl.program_id(1)
    if early:
        gdc_wait()
        gdc_launch_dependents()
    lane = tl.arange(0, block)
    value = tl.full((block,), float("-inf"), tl.float32)
    found = tl.full((block,), -1, tl.int32)  # the step in which a lane saw its best
    broken = tl.zeros((block,), tl.float32)  # becomes NaN with the first NaN or infinity
    base = logits + row.to(tl.int64) * stride
    begin = part * steps * block
    for step in range(tl.minimum(steps, (vocabulary - begin + block - 1) // block)):
        start = begin + step * block
        inside = start + lane < vocabulary
        seen = tl.load(base + start + lane, mask=inside, other=0.0).to(tl.float32)
        broken += seen * 0.0
        for number in tl.static_range(num_masked):
            banned = tl.load(masked_ids + number).to(tl.int32) - start
            inside &= lane != banned
        better = inside & ((seen > value) | (found < 0))
        value = tl.where(better, seen, value)
        found = tl.where(better, step, found)
    nobody = 2147483647
    index = tl.where(found < 0, nobody, begin + found * block + lane)
    largest = tl.max(value, 0)
    winner = tl.min(tl.where(value == largest, index, nobody), 0)
    unsound = tl.max((broken != 0.0).to(tl.int32), 0)  # NaN differs from all, 0 x finite does not
    tl.store(best + row * tl.num_programs(0) + part, largest)
    tl.store(best_id + row * tl.num_programs(0) + part, tl.where(unsound > 0, -1, winner))


@triton.jit(do_not_specialize=["parts"])
def _greedy_join(
    best,
    best_id,
    ids,
    largest,
    sound,
    parts,
    block: tl.constexpr,
    early: tl.constexpr,
):
    """Joins the parts of a row."""
    row = tl.program_id(0)
    if early:
        gdc_wait()
        gdc_launch_dependents()
    lane = tl.arange(0, block)
    inside = lane < parts
    nobody = 2147483647
    value = tl.load(best + row * parts + lane, mask=inside, other=float("-inf"))
    index = tl.load(best_id + row * parts + lane, mask=inside, other=nobody)
    top = tl.max(value, 0)
    winner = tl.min(tl.where(value == top, index, nobody), 0)
    broken = tl.min(index, 0) < 0
    winner = tl.where((winner == nobody) | (winner < 0), 0, winner)
    tl.store(ids + row, winner.to(tl.int64))
    tl.store(largest + row, top)
    tl.store(sound + row, ~broken)
