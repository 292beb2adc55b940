"""Lays the sequences of a step plan end to end as tensors. T tokens, S sequences, R rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from decoder_svc.attention.base import AttentionBatch
from decoder_svc.engine.messages import PlannedSequence, StepPlan
from decoder_svc.runner.seats import SeatTable
from decoder_svc.staging import stage


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a stage needs to run a step."""

    token_ids: torch.Tensor
    """[T]"""
    positions: torch.Tensor
    """[3, T]: time, height, width."""
    slots: torch.Tensor
    """[T]: where K and V of each token go."""
    embeds_at: torch.Tensor
    """[R]: tokens that rows replace."""
    slab_rows: torch.Tensor
    """[R]: where in the slab these rows are, always on the CPU."""
    draws_at: torch.Tensor
    """[draws]: tokens whose logits are sampled from."""
    drawing_seats: torch.Tensor
    """[draws]: the seats of their sequences."""
    batch: AttentionBatch


def build_inputs(
    plan: StepPlan, seats: SeatTable, *, block_size: int, device: torch.device
) -> StepInputs:
    """The tensors of a plan, on the stage's device."""
    sequences = plan.sequences
    batch = _batch(sequences, seats, block_size)
    lengths, starts = batch.lengths, batch.starts
    ends = np.cumsum(lengths)
    firsts = ends - lengths
    owner = np.repeat(np.arange(len(sequences)), lengths)
    index = np.arange(int(ends[-1])) - firsts[owner] + starts[owner]
    pages = batch.block_tables[owner, index // block_size].astype(np.int64)
    token_ids = np.fromiter(
        (token for s in sequences for token in s.token_ids), np.int64, count=int(ends[-1])
    )
    draws = np.array([s.draw is not None for s in sequences])
    embeds_at, slab_rows = _embeds(sequences, firsts)
    placed_ids = stage(token_ids, device)
    seats.fill_in(placed_ids, sequences)
    return StepInputs(
        placed_ids,
        stage(_positions(sequences, firsts, lengths, owner), device),
        stage(pages * block_size + index % block_size, device),
        stage(embeds_at, device),
        torch.from_numpy(slab_rows),
        stage(ends[draws] - 1, device),
        stage(batch.seats[draws], device),
        batch,
    )


def _batch(
    sequences: tuple[PlannedSequence, ...], seats: SeatTable, block_size: int
) -> AttentionBatch:
    lengths = np.array([len(s.token_ids) for s in sequences], dtype=np.int64)
    starts = np.array([s.start for s in sequences], dtype=np.int64)
    rows = np.array([s.seat for s in sequences], dtype=np.int64)
    widest = -(-int((starts + lengths).max()) // block_size)
    tables = seats.tables_of(rows, widest)
    return AttentionBatch(starts, lengths, tables, int((lengths == 1).sum()), rows)


def _positions(
    sequences: tuple[PlannedSequence, ...],
    firsts: np.ndarray,
    lengths: np.ndarray,
    owner: np.ndarray,
) -> np.ndarray:
    bases = np.array([s.position for s in sequences], dtype=np.int64)
    straight = np.arange(len(owner)) - firsts[owner] + bases[owner]
    positions = np.broadcast_to(straight, (3, len(owner))).copy()
    for sequence, first, length in zip(sequences, firsts, lengths, strict=True):
        if sequence.grid_positions:
            grid = np.frombuffer(sequence.grid_positions, dtype=np.int32).reshape(3, -1)
            positions[:, first : first + length] = grid
    return positions


def _embeds(
    sequences: tuple[PlannedSequence, ...], firsts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    tokens, rows = [], []
    for sequence, first in zip(sequences, firsts, strict=True):
        for span in sequence.embeds:
            at = int(first) + span.offset
            for run in span.runs:
                tokens.append(np.arange(at, at + run.num_rows))
                rows.append(np.arange(run.first_slab_row, run.first_slab_row + run.num_rows))
                at += run.num_rows
    if not tokens:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    return np.concatenate(tokens), np.concatenate(rows)
