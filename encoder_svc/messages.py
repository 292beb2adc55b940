"""What crosses the seam between the engine, which makes rows, and the store, which keeps them.

Frozen values and two protocols; no torch, no grpc.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from chiasm.plan import Cause, MediaPlan, Span
from chiasm.transport.base import Region


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """One entry to encode.

    Args:
        key: Names the entry; unique among the jobs in flight.
        plan: The gateway's plan of the whole medium.
        frames: The run of `plan.frame_indices` to encode; None = the whole medium.
        rows: The rows of the medium that run yields; the whole medium when `frames` is None.
        media: The file's bytes, all `plan.media_bytes` of them.
        priority: Higher goes first.
    """

    key: bytes
    plan: MediaPlan
    frames: Span | None
    rows: Span
    media: bytes
    priority: int = 0


@dataclass(frozen=True, slots=True)
class EncodeStats:
    """Where the time of one entry went (milliseconds), and what had to be made up."""

    queue_ms: float
    preprocess_ms: float
    forward_ms: float
    substituted_frames: int = 0


class RowBuffer(Protocol):
    """Rows of one segment, wherever they lie. Freed when the last reference goes."""

    @property
    def num_rows(self) -> int:
        """Rows held."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes held: `num_rows` times the row format's `row_bytes`."""
        ...

    def read(self, begin: int, end: int) -> memoryview:
        """Host bytes of rows [begin, end), counted from the segment's first row; contiguous."""
        ...

    @property
    def region(self) -> Region | None:
        """Where all rows lie one after another in registered memory; None when they do not."""
        ...


class Sink(Protocol):
    """Whom the engine tells. Every call comes on the event loop's thread.

    For each job: `segment_ready` once per segment in order, then `finished`; or `failed` at any
    time. Nothing comes after `EncoderEngine.cancel(key)` has returned.
    """

    def segment_ready(self, key: bytes, segment: int, rows: Span, buffer: RowBuffer) -> None:
        """Rows of a segment are there; `rows` counts in the whole medium, segments from 0."""
        ...

    def finished(self, key: bytes, stats: EncodeStats) -> None:
        """Every segment is there."""
        ...

    def failed(self, key: bytes, cause: Cause, message: str) -> None:
        """No further segment will come; `message` is one clean sentence."""
        ...


class Engine(Protocol):
    """What the servicer sees of `encoder_svc.engine.EncoderEngine`. Event loop's thread only.

    The owner calls `engine.start(sink)` once before the first `submit`, and awaits `engine.stop()`.
    """

    @property
    def pending_patches(self) -> int:
        """Patches submitted and neither finished, failed nor cancelled."""
        ...

    def check(self, plan: MediaPlan, frames: Span | None, rows: Span) -> int:
        """Patches of the job. Raises InvalidRequest or TooLarge for a plan it cannot obey."""
        ...

    def segments(self, plan: MediaPlan, frames: Span | None, rows: Span) -> tuple[Span, ...]:
        """The rows of each segment of a job that `check` accepts, in order; none = not known."""
        ...

    def submit(self, job: EncodeJob) -> None:
        """Starts a job that `check` accepts; its key must not be in flight."""
        ...

    def cancel(self, key: bytes) -> None:
        """Ends a job; the sink hears nothing of it any more. Unknown keys are ignored."""
        ...
