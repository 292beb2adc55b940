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
from decoder_svc.engine.messages import DecodeRows, EmbedSpan, PlannedSequence, StepPlan, StepResult
from decoder_svc.sampling.params import Draw, Sampled, SamplingParams


@dataclass(frozen=True, slots=True)
class Hello:
    """From a rank on another host, once it has shown the secret: who it is."""

    rank: int


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
    most_rows: int = 0
    """Sequences of a decode step that may be told in columns."""


@dataclass(frozen=True, slots=True)
class Alive:
    """From a rank, once a second, whatever it computes."""


@dataclass(frozen=True, slots=True)
class Failed:
    """From a rank: it has raised and ends."""

    message: str
    is_users: bool
    """Whether a setting or the checkpoint is at fault: trying again will not help."""


Message = Hello | Start | StepPlan | Ready | Alive | StepResult | Failed

_PLAN, _RESULT = b"P", b"R"
_PLAIN = {b"H": Hello, b"S": Start, b"L": Ready, b"A": Alive, b"F": Failed}
_TAGS = {kind: tag for tag, kind in _PLAIN.items()}
_PARAMS = tuple(SamplingParams.__dataclass_fields__)
_params_of = attrgetter(*_PARAMS)


def encode(message: Message) -> bytes:
    """One frame."""
    if isinstance(message, StepPlan):
        rows = None if message.decodes is None else _rows_out(message.decodes)
        return _PLAN + _pack((message.step, [_sequence_out(s) for s in message.sequences], rows))
    if isinstance(message, StepResult):
        sampled = [_sampled_out(s) for s in message.sampled]
        return _RESULT + _pack((message.step, sampled, message.token_ids))
    kind = type(message)
    return _TAGS[kind] + _pack([getattr(message, name) for name in kind.__dataclass_fields__])


def decode(frame: bytes) -> Message:
    """The message of a frame. Raises ValueError for what `encode` cannot have made."""
    tag = frame[:1]
    try:
        fields = msgpack.unpackb(frame[1:], use_list=False)
        if tag == _PLAN:
            step, sequences, rows = fields
            decodes = None if rows is None else DecodeRows(rows[0], tuple(map(_draw_in, rows[1])))
            return StepPlan(step, tuple(_sequence_in(sequence) for sequence in sequences), decodes)
        if tag == _RESULT:
            step, sampled, token_ids = fields
            return StepResult(step, tuple(Sampled(*values) for values in sampled), token_ids)
        message: Message = _PLAIN[tag](*fields)
    except (KeyError, TypeError, ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"a frame that makes no sense, tag {tag!r}") from error
    return message


def _pack(fields: Any) -> bytes:
    packed: bytes = msgpack.packb(fields)
    return packed


def _rows_out(rows: DecodeRows) -> tuple[Any, ...]:
    return (rows.numbers, [_draw_out(draw) for draw in rows.draws])


def _sequence_out(sequence: PlannedSequence) -> tuple[Any, ...]:
    embeds = [
        (span.offset, [(run.first_slab_row, run.num_rows) for run in span.runs])
        for span in sequence.embeds
    ]
    return (
        sequence.request_id,
        sequence.choice,
        sequence.seat,
        sequence.token_ids,
        sequence.start,
        sequence.position,
        sequence.block_table,
        sequence.first_block,
        sequence.grid_positions,
        embeds,
        None if sequence.draw is None else _draw_out(sequence.draw),
    )


def _sequence_in(fields: tuple[Any, ...]) -> PlannedSequence:
    request_id, choice, seat, ids, start, position, table, first, grid, embeds, draw = fields
    return PlannedSequence(
        request_id=request_id,
        choice=choice,
        seat=seat,
        token_ids=ids,
        start=start,
        position=position,
        block_table=table,
        first_block=first,
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
