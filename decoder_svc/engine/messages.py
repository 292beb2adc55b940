"""The frozen values of the engine: commands in, events out, step plans down, results up.

Step plans hold ints, strings, bytes, tuples and other such values only: they may cross processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

from chiasm.errors import ChiasmError
from chiasm.plan import Cause, Promise, Source
from decoder_svc.embeddings.events import SlabRun
from decoder_svc.sampling.params import Draw, Sampled, SamplingParams


class FinishReason(StrEnum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"


# Commands: asyncio side -> engine.


@dataclass(frozen=True, slots=True, kw_only=True)
class AddRequest:
    """A checked request."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    promises: tuple[Promise, ...] = ()
    grid_positions: bytes = b""
    """int32 [3, prompt]: M-RoPE positions; empty for text, whose positions count up from 0."""
    position_delta: int = 0
    """Added to a token's index beyond the prompt to get its position."""
    cache_salt: bytes = b""
    adapter_id: str = ""
    priority: int = 0
    resume: tuple[tuple[int, ...], ...] = ()
    """Per choice, output ids of an earlier life on another decoder; empty = a fresh start."""


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """The client has gone."""

    request_id: str


@dataclass(frozen=True, slots=True)
class StopChoice:
    """The gateway has seen a stop string."""

    request_id: str
    choice: int


@dataclass(frozen=True, slots=True)
class RedirectPart:
    """Fetch a part elsewhere; with `hedge`, also there."""

    request_id: str
    item: int
    part: int
    attempt: int
    source: Source
    hedge: bool = False


Command = AddRequest | AbortRequest | StopChoice | RedirectPart


# Events: engine -> asyncio side.


@dataclass(frozen=True, slots=True)
class Tokens:
    """New ids of a choice; `position` is that of the first in the choice's output."""

    choice: int
    position: int
    token_ids: tuple[int, ...]
    sampled: tuple[Sampled, ...] = ()
    """Filled only where logprobs are wanted."""


@dataclass(frozen=True, slots=True)
class ItemReleased:
    """No encoder needs to keep the item for this request."""

    item: int
    from_prefix_cache: bool


@dataclass(frozen=True, slots=True)
class PartFailed:
    """A part's rows will not come from where they were promised."""

    item: int
    part: int
    attempt: int
    cause: Cause
    message: str


@dataclass(frozen=True, slots=True)
class ChoiceDone:
    """A choice ended."""

    choice: int
    reason: FinishReason
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDone:
    """The request ended well; times in ms."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_ms: float
    transfer_ms: float
    prefill_ms: float
    decode_ms: float

    def __str__(self) -> str:
        """For the log."""
        return (
            f"{self.prompt_tokens} + {self.completion_tokens} tokens, {self.cached_tokens} cached; "
            f"ms: queue {self.queue_ms:.1f}, transfer {self.transfer_ms:.1f}, "
            f"prefill {self.prefill_ms:.1f}, decode {self.decode_ms:.1f}"
        )


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The request ended badly."""

    error: ChiasmError


Event = Tokens | ItemReleased | PartFailed | ChoiceDone | RequestDone | RequestFailed


@dataclass(frozen=True, slots=True)
class StepTokens:
    """What a step drew for many choices, in columns: one new id of each."""

    request_ids: tuple[str, ...]
    choices: tuple[int, ...]
    positions: tuple[int, ...]
    """Of the id in the choice's output."""
    token_ids: tuple[int, ...]

    def rows(self) -> Iterator[tuple[str, int, int, int]]:
        """Request id, choice, position and token id, choice by choice."""
        columns = (self.request_ids, self.choices, self.positions, self.token_ids)
        return zip(*columns, strict=True)

    def __iter__(self) -> Iterator[tuple[str, Tokens]]:
        """One by one, by request id."""
        for name, choice, position, token_id in self.rows():
            yield name, Tokens(choice, position, (token_id,))


@dataclass(frozen=True, slots=True)
class StepEvents:
    """All that the engine says at once. The tokens come before the other events."""

    tokens: tuple[StepTokens, ...] = ()
    others: tuple[tuple[str, Event], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.tokens or self.others)

    def __iter__(self) -> Iterator[tuple[str, Event]]:
        """One by one, by request id."""
        return chain(*self.tokens, self.others)


# Plans: scheduler -> ranks.

PENDING = -1
"""In place of a token id: what the sequence's seat drew last, in a step that is not back yet."""

NO_PAGE = -1
"""In place of a page's number: there is no new one."""


@dataclass(frozen=True, slots=True)
class EmbedSpan:
    """Rows that replace tokens of a chunk, from `offset` in the chunk on."""

    offset: int
    runs: tuple[SlabRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSequence:
    """A sequence's share of a step."""

    request_id: str
    choice: int
    seat: int
    """Where ranks keep what they know of the sequence; no other sequence in the batch has it."""
    token_ids: tuple[int, ...]
    """A single PENDING where the id is not known yet."""
    start: int
    """Tokens of the sequence whose K and V are in pages already."""
    position: int
    """Position of the first token; the others follow it, unless `grid_positions` is given."""
    block_table: tuple[int, ...]
    """Page ids in order, from page `first_block` of the sequence on."""
    first_block: int = 0
    """Pages before this one are as earlier steps said."""
    grid_positions: bytes = b""
    """int32 [3, tokens]: time, height, width of each token."""
    embeds: tuple[EmbedSpan, ...] = ()
    draw: Draw | None = None
    """Set when the chunk ends the known tokens: the next one is to be sampled."""


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Sequences of one token of text and one draw each, in columns: most steps are of this kind."""

    numbers: bytes
    """int32 [6, S]: token id or PENDING, seat, tokens before it, position, and if the sequence has
    one page more than ranks know of, which of its pages that is (else NO_PAGE) and the page's id.
    """
    draws: tuple[Draw, ...] = ()
    """One a sequence; none at all when every token drawn is simply the likeliest."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One micro-batch: first what is told in columns, then sequences, of a single token first."""

    step: int
    sequences: tuple[PlannedSequence, ...] = ()
    decodes: DecodeRows | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The draws of a step, in the order of its plan."""

    step: int
    sampled: tuple[Sampled, ...] = ()
    token_ids: tuple[int, ...] = ()
    """Instead of `sampled`, when the ids are all there is to tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What the engine is busy with, after a step."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_usage_ratio: float = 0.0
    slab_pages_free: int = 0
    requests_seen: int = 0
    """AddRequests taken from the inbox so far."""
    available: bool = True
    """Whether there are ranks to compute on."""
    num_losses: int = 0
    """How often ranks were lost, and every page with them."""
