"""What the engine and its ranks say to each other, as bytes: plain values in msgpack, never pickle.

Steps go down (`Start` first, then step plans), results and signs of life come up. A frame is a
one-letter tag and the fields in order; both ends run the same version, so there are no names.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any

import msgpack

from decoder_svc.embeddings.events import SlabRun
from decoder_svc.engine.messages import EmbedSpan, PlannedSequence, StepPlan, StepResult
from decoder_svc.sampling.params import Draw, Sampled, SamplingParams


@dataclass(frozen=True, slots=True)
class Start:
    """To a rank that has connected: join the group and load."""

    group: str
    """The group's name, never one twice: ranks of different lives never meet."""
    num_blocks: int
    """Pages of K and V to take; 0 = as many as the rank with the least room can hold."""


@dataclass(frozen=True, slots=True)
class Ready:
    """From a rank: loaded, with so many pages."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class Alive:
    """From a rank, once a second, whatever it computes."""


@dataclass(frozen=True, slots=True)
class Failed:
    """From a rank: it has raised and ends."""

    message: str
    is_users: bool
    """Whether a setting or the checkpoint is at fault: trying again will not help."""


Message = Start | StepPlan | Ready | Alive | StepResult | Failed

_PARAMS = tuple(SamplingParams.__dataclass_fields__)
_params_of = attrgetter(*_PARAMS)


def encode(message: Message) -> bytes:
    """One frame."""
    match message:
        case StepPlan():
            sequences = [_sequence_out(sequence) for sequence in message.sequences]
            return b"P" + _pack((message.step, sequences))
        case StepResult():
            return b"R" + _pack((message.step, [_sampled_out(s) for s in message.sampled]))
        case Alive():
            return b"A"
        case Start():
            return b"S" + _pack((message.group, message.num_blocks))
        case Ready():
            return b"L" + _pack((message.num_blocks,))
        case Failed():
            return b"F" + _pack((message.message, message.is_users))


def decode(frame: bytes) -> Message:
    """The message of a frame. Raises ValueError for what `encode` cannot have made."""
    tag, body = frame[:1], frame[1:]
    if tag == b"A":
        return Alive()
    fields = msgpack.unpackb(body, use_list=False, strict_map_key=True)
    match tag:
        case b"P":
            step, sequences = fields
            return StepPlan(step, tuple(_sequence_in(sequence) for sequence in sequences))
        case b"R":
            step, sampled = fields
            return StepResult(step, tuple(Sampled(*values) for values in sampled))
        case b"S":
            return Start(*fields)
        case b"L":
            return Ready(*fields)
        case b"F":
            return Failed(*fields)
    raise ValueError(f"a frame with unknown tag {tag!r}")


def _pack(fields: Any) -> bytes:
    packed: bytes = msgpack.packb(fields)
    return packed


def _sequence_out(sequence: PlannedSequence) -> tuple[Any, ...]:
    embeds = [
        (span.offset, [(run.first_slab_row, run.num_rows) for run in span.runs])
        for span in sequence.embeds
    ]
    return (
        sequence.request_id,
        sequence.choice,
        sequence.token_ids,
        sequence.start,
        sequence.position,
        sequence.block_table,
        sequence.grid_positions,
        embeds,
        None if sequence.draw is None else _draw_out(sequence.draw),
    )


def _sequence_in(fields: tuple[Any, ...]) -> PlannedSequence:
    request_id, choice, token_ids, start, position, table, grid, embeds, draw = fields
    return PlannedSequence(
        request_id=request_id,
        choice=choice,
        token_ids=token_ids,
        start=start,
        position=position,
        block_table=table,
        grid_positions=grid,
        embeds=tuple(EmbedSpan(at, tuple(SlabRun(*run) for run in runs)) for at, runs in embeds),
        draw=None if draw is None else _draw_in(draw),
    )


def _draw_out(draw: Draw) -> tuple[Any, ...]:
    params = _pack(_params_of(draw.params))
    return (params, draw.choice, draw.position, draw.prompt_ids, draw.output_ids)


def _draw_in(fields: tuple[Any, ...]) -> Draw:
    params, *rest = fields
    return Draw(_params_in(params), *rest)


@lru_cache(maxsize=4096)
def _params_in(packed: bytes) -> SamplingParams:
    """The same settings come with every step of a request; they are unpacked and checked once."""
    values = msgpack.unpackb(packed, use_list=False)
    return SamplingParams(**dict(zip(_PARAMS, values, strict=True)))


def _sampled_out(sampled: Sampled) -> tuple[Any, ...]:
    return (
        sampled.token_id,
        sampled.finite,
        sampled.logprob,
        sampled.top_ids,
        sampled.top_logprobs,
    )
