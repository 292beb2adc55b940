"""One Fetch as the decoder sees it, the part it serves, and the item that part belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from chiasm.plan import Source, Span
from decoder_svc.embeddings.events import Ready
from decoder_svc.embeddings.rows import ItemRows, Slot


class FetchState(StrEnum):
    """The life of a fetch.

    opening -> active -> ending -> (Quiesced) gone. Or, from anywhere: broken -> (Fenced) gone.
    """

    OPENING = "opening"  # nothing is ready yet
    ACTIVE = "active"  # the first Ready came and it won its part
    ENDING = "ending"  # not wanted any more; its grants wait for Quiesced
    BROKEN = "broken"  # the stream is gone; its grants are in quarantine until Fenced


@dataclass(slots=True, eq=False)
class Fetch:
    """One stream to one encoder.

    It owns the slots of its grants until they have landed: whatever becomes of the request, their
    pages come free only when this fetch can write no more.
    """

    fetch_id: bytes
    request_id: str
    item: int
    part: int
    rows: Span  # of the part
    attempt: int
    source: Source
    state: FetchState = FetchState.OPENING
    segments: dict[int, Span] = field(default_factory=dict)  # that are ready
    announced: dict[int, Span] = field(default_factory=dict)  # that will be, and may be granted
    grants: dict[int, tuple[int, list[Slot]]] = field(default_factory=dict)  # seq: segment, slots
    num_grants: int = 0
    num_rows_granted: int = 0
    num_grants_lost: int = 0  # the first so many do not count in memory of a rank: it is gone

    @property
    def live(self) -> bool:
        """Whether rows are still wanted from it."""
        return self.state in (FetchState.OPENING, FetchState.ACTIVE)

    @property
    def slots(self) -> Iterator[Slot]:
        """Slots that the encoder may still write to."""
        return (slot for _, slots in self.grants.values() for slot in slots)

    def refusal(self, ready: Ready) -> str | None:
        """Why a Ready cannot be true of this part; None when it can."""
        rows = ready.rows
        if not len(rows) or rows.intersect(self.rows) != rows:
            return f"ready rows [{rows.begin}, {rows.end}) are not rows of the part"
        if ready.segment in self.segments:
            return f"segment {ready.segment} became ready twice"
        if any(len(rows.intersect(other)) for other in self.segments.values()):
            return f"segment {ready.segment} overlaps another"
        return None

    def announce(self, segments: Sequence[Span]) -> None:
        """Takes in what the encoder will make; what cannot be true of this part is forgotten."""
        edge = 0
        for segment, rows in enumerate(segments):
            if rows.begin < edge:
                self.announced.clear()
                return
            edge = rows.end
            piece = rows.intersect(self.rows)
            if len(piece):
                self.announced[segment] = piece

    def cover(self, span: Span) -> Iterator[tuple[int | None, Span]]:
        """Cuts `span` by segment, in row order; None for rows that are not ready."""
        edge = span.begin
        for segment, rows in sorted(self.segments.items(), key=lambda s: s[1].begin):
            piece = rows.intersect(span)
            if not len(piece):
                continue
            if piece.begin > edge:
                yield None, Span(edge, piece.begin)
            yield segment, piece
            edge = piece.end
        if edge < span.end:
            yield None, Span(edge, span.end)


@dataclass(slots=True, eq=False)
class PartState:
    """Where one part of an item is to come from."""

    part: int
    rows: Span
    attempt: int
    lost_attempt: int = -1  # the newest attempt that was reported lost
    candidates: list[Fetch] = field(default_factory=list)  # live fetches: one, or more when hedged

    @property
    def promising(self) -> Fetch | None:
        """The fetch that segments may be granted to before they are ready: one without a rival."""
        return self.candidates[0] if len(self.candidates) == 1 else None

    @property
    def winner(self) -> Fetch | None:
        """The fetch whose Ready came first."""
        return next((f for f in self.candidates if f.state is FetchState.ACTIVE), None)


@dataclass(slots=True, eq=False)
class ItemState:
    """One medium of a request."""

    digest: bytes
    rows: ItemRows
    parts: dict[int, PartState]
    landed_told: bool = False


@dataclass(slots=True)
class Counters:
    """What was dropped, since the start."""

    stale_events: int = 0  # of fetches that are over, or not wanted any more
    stale_attempts: int = 0  # Redirects and AddSources that came too late
    refused_ready: int = 0  # Readies that cannot be true
