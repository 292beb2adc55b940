"""What a request has become once it is planned: what both services are told, as frozen values."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

from chiasm.errors import ChiasmError, EmbeddingLost, InvalidMedia, TooLarge
from chiasm.plan import Cause, MediaPlan, Span
from chiasm.runs import frame_runs
from chiasm.v1 import common_pb2, decoder_pb2
from gateway.messages import Envelope, Sampling


@dataclass(frozen=True, slots=True)
class Item:
    """One medium in its place. Items of one digest share their bytes and their encode."""

    index: int
    plan: MediaPlan
    data: bytes
    runs: tuple[Span, ...]
    """Where its placeholders are in the prompt."""
    param: str
    tower: bytes
    """The tower its digest was made with: only encoders that hold it will do."""


@dataclass(frozen=True, slots=True)
class Order:
    """Everything `Flight` needs to know about a request."""

    context: common_pb2.RequestContext
    token_ids: tuple[int, ...]
    items: tuple[Item, ...]
    sampling: decoder_pb2.SamplingParams
    decode_bytes: int = 0
    """Memory that decoding its media takes, reckoned."""


@dataclass(frozen=True, slots=True)
class Run:
    """A part of one medium that one encoder makes: all of it, or some of a clip's frames."""

    part: int
    rows: Span
    frames: Span | None
    """None = all of the medium."""
    patches: int
    key: bytes
    """What it is routed by: the digest, or one of its own per run."""


def split(plan: MediaPlan, num_runs: int) -> tuple[Run, ...]:
    """Cuts a clip into at most so many runs; pictures stay whole. See `chiasm.runs`."""
    cuts = frame_runs(plan, num_runs)
    if len(cuts) == 1:
        return (Run(0, cuts[0].rows, None, plan.patches, plan.digest),)
    return tuple(
        Run(
            part=part,
            rows=cut.rows,
            frames=cut.frames,
            patches=plan.patches * len(cut.rows) // plan.num_rows,
            key=hashlib.sha256(plan.digest + repr(cut.frames).encode()).digest(),
        )
        for part, cut in enumerate(cuts)
    )


def context_of(job: Envelope) -> common_pb2.RequestContext:
    """The part of a job that goes to every service."""
    return common_pb2.RequestContext(
        request_id=job.request_id,
        model=job.model,
        cache_salt=job.tenant_salt,
        priority=job.priority,
        traceparent=job.traceparent,
        tracestate=job.tracestate,
    )


def sampling_of(
    sampling: Sampling, *, room: int, grammar: decoder_pb2.Grammar | None = None
) -> decoder_pb2.SamplingParams:
    """Sampling on the wire. Too large a `max_tokens` is cut to what the context has room for."""
    return decoder_pb2.SamplingParams(
        max_tokens=room if sampling.max_tokens is None else min(sampling.max_tokens, room),
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        n=sampling.n,
        top_logprobs=sampling.top_logprobs,
        grammar=grammar,
        logit_bias=[
            decoder_pb2.LogitBias(token_id=token_id, bias=bias)
            for token_id, bias in sampling.logit_bias
        ],
    )


def cause_error(cause: common_pb2.Cause, message: str, *, param: str) -> ChiasmError:
    """The error that a cause means: the client's fault with its part named, or ours."""
    try:
        known = Cause.from_proto(cause)
    except ValueError:
        known = Cause.LOST
    if known is Cause.INVALID_MEDIA:
        return InvalidMedia(message or "the medium cannot be decoded", param=param)
    if known is Cause.TOO_LARGE:
        return TooLarge(message or "the medium is too large", param=param)
    return EmbeddingLost(message or f"embedding {known.value}")
