"""Writes down what was chosen for a step, for ranks to compute."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from decoder_svc.embeddings.receiver import EmbeddingReceiver
from decoder_svc.engine.messages import NO_PAGE, PENDING, DecodeRows, PlannedSequence, StepPlan
from decoder_svc.engine.request import Sequence
from decoder_svc.scheduler.budget import embed_spans

Chosen = list[tuple[Sequence, int]]
"""Sequences and how many tokens of each."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A sequence's part in a step that has been submitted."""

    sequence: Sequence
    length: int
    draws: bool


def plan_step(
    step: int, chosen: Chosen, receiver: EmbeddingReceiver, *, most_rows: int
) -> tuple[StepPlan, list[Entry]]:
    """The plan, and its entries in the same order; sequences count as in flight from here on.

    Args:
        step: Its number.
        chosen: Whom to plan for.
        receiver: Where rows of media lie.
        most_rows: Sequences of a decode step that may be told in columns.
    """
    if len(chosen) <= most_rows:
        rows = _decode_rows(chosen)
        if rows is not None:
            for sequence, _ in chosen:
                sequence.begin(1, draws=True)
            return StepPlan(step, decodes=rows), [Entry(s, 1, draws=True) for s, _ in chosen]
    chosen.sort(key=lambda pair: pair[1] > 1)  # stable: single tokens first
    planned = tuple(_planned(sequence, length, receiver) for sequence, length in chosen)
    entries = []
    for (sequence, length), part in zip(chosen, planned, strict=True):
        draws = part.draw is not None
        sequence.begin(length, draws)
        entries.append(Entry(sequence, length, draws))
    return StepPlan(step, planned), entries


def _planned(sequence: Sequence, length: int, receiver: EmbeddingReceiver) -> PlannedSequence:
    begin, end = sequence.num_scheduled, sequence.num_scheduled + length
    request = sequence.request
    told, sequence.num_told = sequence.num_told, len(sequence.blocks)
    assert sequence.seat is not None, "not in the batch"
    return PlannedSequence(
        request_id=request.request_id,
        choice=sequence.choice,
        seat=sequence.seat,
        token_ids=sequence.tokens(begin, end),
        start=begin,
        position=request.position(begin),
        block_table=tuple(sequence.blocks[told:]),
        first_block=told,
        grid_positions=request.grid_positions(begin, end),
        embeds=embed_spans(sequence, length, receiver),
        draw=sequence.draw() if length == sequence.num_left else None,
    )


def _decode_rows(chosen: Chosen) -> DecodeRows | None:
    """The columns, if all sequences decode and have at most one new page; nothing is noted else."""
    ids, starts, positions, numbers, pages = [], [], [], [], []
    seats: list[int] = []
    plain = True
    for sequence, length in chosen:
        told, blocks = sequence.num_told, sequence.blocks
        start = sequence.num_scheduled
        if length > 1 or start < sequence.request.num_prompt or len(blocks) > told + 1:
            return None
        if sequence.num_tokens + sequence.num_drawing != start + 1:
            return None
        ids.append(PENDING if sequence.num_drawing else sequence.output[-1])
        assert sequence.seat is not None, "not in the batch"
        seats.append(sequence.seat)
        starts.append(start)
        positions.append(start + sequence.request.position_delta)
        if len(blocks) > told:
            numbers.append(told)
            pages.append(blocks[told])
        else:
            numbers.append(NO_PAGE)
            pages.append(0)
        plain = plain and sequence.request.is_plain
    for sequence, _ in chosen:
        sequence.num_told = len(sequence.blocks)
    columns = array("i", [*ids, *seats, *starts, *positions, *numbers, *pages])
    draws = () if plain else tuple(sequence.draw() for sequence, _ in chosen)
    return DecodeRows(columns.tobytes(), draws)
