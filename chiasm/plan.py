"""Media plans and promises as frozen values, and their protobuf twins.

The gateway makes them, encoder and decoder obey them. Owns no policy: how a plan is made is
`gateway.planning`'s business.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import StrEnum
from typing import cast

from chiasm.v1 import common_pb2, decoder_pb2

_MOST_MEMBERS = 1 << 32  # rows and frames are counted in 32 bits


class Modality(StrEnum):
    """What kind of medium a part of a message is."""

    IMAGE = "image"
    VIDEO = "video"


class Cause(StrEnum):
    """Why rows did not arrive."""

    LOST = "lost"
    EVICTED = "evicted"
    PREEMPTED = "preempted"
    TIMEOUT = "timeout"
    INVALID_MEDIA = "invalid_media"
    TOO_LARGE = "too_large"

    @property
    def retryable(self) -> bool:
        """Whether another encoder may do better; the client's own faults are never retried."""
        return self not in (Cause.INVALID_MEDIA, Cause.TOO_LARGE)

    def to_proto(self) -> common_pb2.Cause:
        """The wire value."""
        return cast("common_pb2.Cause", common_pb2.Cause.Value(f"CAUSE_{self.name}"))

    @classmethod
    def from_proto(cls, value: common_pb2.Cause) -> Cause:
        """Raises ValueError for an unspecified or unknown cause."""
        return cls(common_pb2.Cause.Name(value).removeprefix("CAUSE_").lower())


@dataclass(frozen=True, slots=True)
class Span:
    """Half-open range of rows or frames."""

    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin

    def intersect(self, other: Span) -> Span:
        """The overlap; empty (begin == end) when there is none."""
        begin = max(self.begin, other.begin)
        return Span(begin, max(begin, min(self.end, other.end)))

    def to_proto(self) -> common_pb2.Range:
        """The wire value."""
        return common_pb2.Range(begin=self.begin, end=self.end)

    @classmethod
    def from_proto(cls, message: common_pb2.Range) -> Span:
        """Raises ValueError when the range runs backwards or has more than 2^32 members."""
        if message.end < message.begin:
            raise ValueError(f"range runs backwards: [{message.begin}, {message.end})")
        if message.end - message.begin > _MOST_MEMBERS:
            raise ValueError(f"impossible range: [{message.begin}, {message.end})")
        return cls(message.begin, message.end)


@dataclass(frozen=True, slots=True)
class Grid:
    """Patches before merging: temporal x vertical x horizontal."""

    t: int
    h: int
    w: int

    @property
    def patches(self) -> int:
        """Number of patches."""
        return self.t * self.h * self.w


@dataclass(frozen=True, slots=True)
class MediaPlan:
    """What the gateway decided about one medium. See `MediaPlan` in common.proto."""

    digest: bytes
    family: str
    modality: Modality
    source_height: int
    source_width: int
    resized_height: int
    resized_width: int
    grids: tuple[Grid, ...]
    num_rows: int
    media_bytes: int
    media_type: str
    frame_indices: tuple[int, ...] = ()
    frame_timestamps_s: tuple[float, ...] = ()
    seconds_per_grid: float = 0.0

    @property
    def patches(self) -> int:
        """Patches the tower has to see: the encoder's unit of work."""
        return sum(grid.patches for grid in self.grids)

    def to_proto(self) -> common_pb2.MediaPlan:
        """The wire value."""
        return common_pb2.MediaPlan(
            digest=self.digest,
            family=self.family,
            modality=f"MODALITY_{self.modality.name}",
            source_height=self.source_height,
            source_width=self.source_width,
            resized_height=self.resized_height,
            resized_width=self.resized_width,
            grids=[common_pb2.Grid(t=g.t, h=g.h, w=g.w) for g in self.grids],
            num_rows=self.num_rows,
            frame_indices=self.frame_indices,
            frame_timestamps_s=self.frame_timestamps_s,
            seconds_per_grid=self.seconds_per_grid,
            media_bytes=self.media_bytes,
            media_type=self.media_type,
        )

    @classmethod
    def from_proto(cls, message: common_pb2.MediaPlan) -> MediaPlan:
        """Raises ValueError for a modality this build does not know."""
        return cls(
            digest=message.digest,
            family=message.family,
            modality=Modality(
                common_pb2.Modality.Name(message.modality).removeprefix("MODALITY_").lower()
            ),
            source_height=message.source_height,
            source_width=message.source_width,
            resized_height=message.resized_height,
            resized_width=message.resized_width,
            grids=tuple(Grid(g.t, g.h, g.w) for g in message.grids),
            num_rows=message.num_rows,
            media_bytes=message.media_bytes,
            media_type=message.media_type,
            frame_indices=tuple(message.frame_indices),
            frame_timestamps_s=tuple(message.frame_timestamps_s),
            seconds_per_grid=message.seconds_per_grid,
        )


@dataclass(frozen=True, slots=True)
class Source:
    """One place where the rows of a part can be fetched."""

    encode_id: bytes
    endpoint: str
    encoder_epoch: int

    def to_proto(self) -> decoder_pb2.Source:
        """The wire value."""
        return decoder_pb2.Source(
            encode_id=self.encode_id, endpoint=self.endpoint, encoder_epoch=self.encoder_epoch
        )

    @classmethod
    def from_proto(cls, message: decoder_pb2.Source) -> Source:
        """The value of a wire message."""
        return cls(message.encode_id, message.endpoint, message.encoder_epoch)


@dataclass(frozen=True, slots=True)
class Part:
    """A run of rows of one item and where it comes from."""

    part: int
    rows: Span
    source: Source
    frames: Span | None = None
    attempt: int = 1


@dataclass(frozen=True, slots=True)
class Promise:
    """One medium of a prompt: its plan, its first placeholder position, its parts by row range."""

    item: int
    plan: MediaPlan
    prompt_offset: int
    parts: tuple[Part, ...]
    placeholders: tuple[Span, ...] = ()
    """Prompt positions of its rows, run by run; empty = one run from `prompt_offset` on."""
    runs: tuple[Span, ...] = field(init=False, repr=False, compare=False)
    """Prompt positions of its rows; text stands between two runs."""

    def __post_init__(self) -> None:
        whole = Span(self.prompt_offset, self.prompt_offset + self.plan.num_rows)
        object.__setattr__(self, "runs", self.placeholders or (whole,))

    @property
    def prompt_end(self) -> int:
        """The prompt position behind its last row."""
        return self.runs[-1].end

    def row_at(self, index: int) -> int:
        """The first row at or behind a prompt position; `num_rows` when there is none."""
        if index >= self.prompt_end:
            return self.plan.num_rows
        row = 0
        for run in self.runs:
            if index < run.end:
                return row + max(0, index - run.begin)
            row += len(run)
        raise AssertionError("the last run ends at prompt_end")

    def index_of(self, row: int) -> int:
        """The prompt position of a row."""
        for run in self.runs:
            if row < len(run):
                return run.begin + row
            row -= len(run)
        raise AssertionError("no such row")

    def stretches(self, begin: int, end: int) -> list[tuple[int, Span]]:
        """Prompt positions [begin, end) that hold rows: where each stretch begins, and its rows."""
        found = []
        row = 0
        for run in self.runs:
            inside = run.intersect(Span(begin, max(begin, end)))
            if len(inside):
                first = row + inside.begin - run.begin
                found.append((inside.begin, Span(first, first + len(inside))))
            row += len(run)
        return found

    def to_proto(self) -> decoder_pb2.Promise:
        """The wire value."""
        return decoder_pb2.Promise(
            item=self.item,
            plan=self.plan.to_proto(),
            prompt_offset=self.prompt_offset,
            parts=[
                decoder_pb2.Part(
                    part=p.part,
                    rows=p.rows.to_proto(),
                    frames=p.frames.to_proto() if p.frames else None,
                    source=p.source.to_proto(),
                    attempt=p.attempt,
                )
                for p in self.parts
            ],
            placeholders=[run.to_proto() for run in self.placeholders],
        )

    @classmethod
    def from_proto(cls, message: decoder_pb2.Promise) -> Promise:
        """Raises ValueError when parts or placeholders do not cover the item's rows exactly."""
        plan = MediaPlan.from_proto(message.plan)
        parts = tuple(
            Part(
                part=p.part,
                rows=Span.from_proto(p.rows),
                source=Source.from_proto(p.source),
                frames=Span.from_proto(p.frames) if p.HasField("frames") else None,
                attempt=p.attempt,
            )
            for p in message.parts
        )
        edge = 0
        for part in parts:
            if part.rows.begin != edge or not len(part.rows):
                raise ValueError(f"item {message.item}: part {part.part} does not begin at {edge}")
            edge = part.rows.end
        if edge != plan.num_rows:
            raise ValueError(f"item {message.item}: parts cover {edge} of {plan.num_rows} rows")
        placeholders = tuple(Span.from_proto(run) for run in message.placeholders)
        _check_placeholders(message.item, plan, message.prompt_offset, placeholders)
        return cls(message.item, plan, message.prompt_offset, parts, placeholders)


def _check_placeholders(item: int, plan: MediaPlan, offset: int, runs: tuple[Span, ...]) -> None:
    if not runs:
        return
    edges = [offset, *(edge for run in runs for edge in (run.begin, run.end))]
    if edges[1] != offset or any(a > b for a, b in itertools.pairwise(edges)):
        raise ValueError(f"item {item}: placeholders overlap or do not begin at prompt_offset")
    if not all(map(len, runs)) or sum(map(len, runs)) != plan.num_rows:
        raise ValueError(f"item {item}: placeholders for {sum(map(len, runs))} rows")
