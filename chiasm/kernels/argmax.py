"""Greedy sampling: the largest logit of each row, and whether the row is sound.

The row is read once, split across programs so that small batches fill the GPU too; a second, small
kernel joins the parts.
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

BLOCK, WARPS = 2048, 4
PROGRAMS = 528
"""Four for each of 132 multiprocessors."""


def greedy(
    logits: torch.Tensor, masked_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [B, V] to ids [B] int64, their logits [B] float32, and soundness [B] bool.

    The smallest id wins a tie. `masked_ids` [m] int64 never win (if all ids are masked, the id is
    0 and its logit -inf). A row with a NaN or an infinity anywhere is not sound, and its id, which
    is in range, means nothing.
    """
    if not compiled(logits):
        return greedy_reference(logits, masked_ids)
    batch, vocabulary = logits.shape
    device = logits.device
    parts = min(ceil_div(PROGRAMS, max(batch, 1)), ceil_div(vocabulary, BLOCK))
    span = ceil_div(ceil_div(vocabulary, parts), BLOCK) * BLOCK
    parts = ceil_div(vocabulary, span)
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
            span,
            num_masked=masked_ids.shape[0],
            block=BLOCK,
            num_warps=WARPS,
        )
        _greedy_join[(batch,)](
            best, best_id, ids, largest, sound, parts, block=power_of_two(parts), num_warps=1
        )
    return ids, largest, sound


def greedy_reference(
    logits: torch.Tensor, masked_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`greedy` in plain torch."""
    wide = logits.float()
    sound = wide.isfinite().all(dim=-1)
    wide = wide.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    wide[:, masked_ids] = -torch.inf
    largest = wide.amax(dim=-1)
    vocabulary = wide.shape[1]
    allowed = torch.ones(vocabulary, dtype=torch.bool, device=wide.device)
    allowed[masked_ids] = False
    index = torch.arange(vocabulary, device=wide.device)
    wins = (wide == largest[:, None]) & allowed
    ids = torch.where(wins, index, vocabulary).amin(dim=-1)
    return torch.where(ids < vocabulary, ids, 0), largest, sound


@jit
def _greedy_parts(
    logits: Pointer,
    masked_ids: Pointer,
    best: Pointer,
    best_id: Pointer,
    stride: Scalar,
    vocabulary: Scalar,
    span: Scalar,
    num_masked: constexpr,
    block: constexpr,
) -> None:
    """The best of logits[row, part x span : (part + 1) x span]; id -1 says: not sound."""
    part, row = tl.program_id(0), tl.program_id(1)
    nobody = 2147483647
    lane = tl.arange(0, block)
    value = tl.full((block,), float("-inf"), tl.float32)
    index = tl.full((block,), nobody, tl.int32)
    broken = tl.zeros((block,), tl.int32)
    base = logits + row.to(tl.int64) * stride
    for start in tl.range(part * span, tl.minimum((part + 1) * span, vocabulary), block):
        here = start + lane
        inside = here < vocabulary
        seen = tl.load(base + here, mask=inside, other=0.0).to(tl.float32)
        finite = tl.abs(seen) < float("inf")
        broken |= (~finite).to(tl.int32)
        seen = tl.where(finite, seen, float("-inf"))
        for number in range(num_masked):
            inside &= here != tl.load(masked_ids + number)
        better = inside & ((seen > value) | (index == nobody))
        value = tl.where(better, seen, value)
        index = tl.where(better, here, index)
    largest = tl.max(value, 0)
    winner = tl.min(tl.where(value == largest, index, nobody), 0)
    winner = tl.where(tl.max(broken, 0) > 0, -1, winner)
    tl.store(best + row * tl.num_programs(0) + part, largest)
    tl.store(best_id + row * tl.num_programs(0) + part, winner)


@jit
def _greedy_join(
    best: Pointer,
    best_id: Pointer,
    ids: Pointer,
    largest: Pointer,
    sound: Pointer,
    parts: Scalar,
    block: constexpr,
) -> None:
    """Joins the parts of a row."""
    row = tl.program_id(0)
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
