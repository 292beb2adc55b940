"""Lays the sequences of a step plan end to end as tensors. T tokens, S sequences, R rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from decoder_svc.attention.base import AttentionBatch
from decoder_svc.engine.messages import PENDING, PlannedSequence, StepPlan
from decoder_svc.runner.rows import Ints, columns_of
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
    columns = _NO_COLUMNS if plan.decodes is None else columns_of(plan.decodes)
    batch = _batch(columns, sequences, seats, block_size)
    lengths, starts = batch.lengths, batch.starts
    ends = np.cumsum(lengths)
    firsts = ends - lengths
    owner = np.repeat(np.arange(len(lengths)), lengths)
    index = np.arange(int(ends[-1])) - firsts[owner] + starts[owner]
    pages = batch.block_tables[owner, index // block_size].astype(np.int64)
    ids = [token for s in sequences for token in s.token_ids]
    token_ids = _after(columns[0], ids)
    draws = np.array([True] * columns.shape[1] + [s.draw is not None for s in sequences])
    embeds_at, slab_rows = _embeds(sequences, firsts[columns.shape[1] :])
    placed_ids = stage(token_ids, device)
    unknown = (token_ids == PENDING).nonzero()[0]
    seats.fill_in(placed_ids, unknown, batch.seats[owner[unknown]])
    return StepInputs(
        placed_ids,
        stage(_positions(columns, sequences, firsts, owner), device),
        stage(pages * block_size + index % block_size, device),
        stage(embeds_at, device),
        torch.from_numpy(slab_rows),
        stage(ends[draws] - 1, device),
        stage(batch.seats[draws], device),
        batch,
    )


_NO_COLUMNS: Ints = np.empty((6, 0), dtype=np.int32)


def _after(column: Ints, values: list[int]) -> np.ndarray:
    """int64: what a column says, then of each sequence that is told by itself."""
    return np.concatenate((column, np.array(values, dtype=np.int64)), dtype=np.int64)


def _batch(
    columns: Ints, sequences: tuple[PlannedSequence, ...], seats: SeatTable, block_size: int
) -> AttentionBatch:
    count = columns.shape[1]
    long = [len(s.token_ids) for s in sequences]
    lengths = np.array([1] * count + long, dtype=np.int64)
    starts = _after(columns[2], [s.start for s in sequences])
    rows = _after(columns[1], [s.seat for s in sequences])
    widest = -(-int((starts + lengths).max()) // block_size)
    tables = seats.tables_of(rows, widest)
    return AttentionBatch(starts, lengths, tables, count + long.count(1), rows)


def _positions(
    columns: Ints,
    sequences: tuple[PlannedSequence, ...],
    firsts: np.ndarray,
    owner: np.ndarray,
) -> np.ndarray:
    bases = _after(columns[3], [s.position for s in sequences])
    positions = np.empty((3, len(owner)), dtype=np.int64)
    positions[:] = np.arange(len(owner)) + (bases - firsts)[owner]
    for sequence, first in zip(sequences, firsts[columns.shape[1] :], strict=True):
        if sequence.grid_positions:
            grid = np.frombuffer(sequence.grid_positions, dtype=np.int32).reshape(3, -1)
            positions[:, first : first + grid.shape[1]] = grid
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
