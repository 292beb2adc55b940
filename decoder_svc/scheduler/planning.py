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
        most_rows: Decoding sequences of a step that may be told in columns.
    """
    fitting: Chosen = []
    others: Chosen = []
    for pair in chosen:
        (fitting if most_rows and _fits_columns(*pair) else others).append(pair)
    if len(fitting) > most_rows:
        fitting, others = [], chosen
    rows = _decode_rows(fitting) if fitting else None
    for sequence, _ in fitting:
        sequence.begin(1, draws=True)
    entries = [Entry(sequence, 1, draws=True) for sequence, _ in fitting]
    others.sort(key=lambda pair: pair[1] > 1)  # stable: single tokens first
    planned = tuple(_planned(sequence, length, receiver) for sequence, length in others)
    for (sequence, length), part in zip(others, planned, strict=True):
        draws = part.draw is not None
        sequence.begin(length, draws)
        entries.append(Entry(sequence, length, draws))
    return StepPlan(step, planned, rows), entries


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


def _fits_columns(sequence: Sequence, length: int) -> bool:
    """Whether it computes the token it drew last, draws the next, and has at most one new page."""
    start = sequence.num_scheduled
    return (
        length == 1
        and start >= sequence.request.num_prompt
        and len(sequence.blocks) <= sequence.num_told + 1
        and sequence.num_tokens + sequence.num_drawing == start + 1
    )


def _decode_rows(chosen: Chosen) -> DecodeRows:
    """The columns of sequences that fit into them."""
    ids, starts, positions, numbers, pages = [], [], [], [], []
    seats: list[int] = []
    plain = True
    for sequence, _ in chosen:
        told, blocks, request = sequence.num_told, sequence.blocks, sequence.request
        start = sequence.num_scheduled
        ids.append(PENDING if sequence.num_drawing else sequence.output[-1])
        assert sequence.seat is not None, "not in the batch"
        seats.append(sequence.seat)
        starts.append(start)
        positions.append(start + request.position_delta)
        if len(blocks) > told:
            numbers.append(told)
            pages.append(blocks[told])
            sequence.num_told = len(blocks)
        else:
            numbers.append(NO_PAGE)
            pages.append(0)
        plain = plain and request.is_plain
    columns = array("i", [*ids, *seats, *starts, *positions, *numbers, *pages])
    draws = () if plain else tuple(sequence.draw() for sequence, _ in chosen)
    return DecodeRows(columns.tobytes(), draws)
