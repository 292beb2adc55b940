"""Rows by digest: what is being encoded, what is kept, who is interested, what may go.

Policy only: no tensors, no sockets, no clock. The rules:

- Interest in an entry = its open Encode streams + its open Fetch streams. An unfinished entry
  without interest is cancelled; a finished one becomes cache, evicted when space is needed.
- Space for all of an entry's rows is reserved when it is admitted, from the plan. What does not fit
  is refused at once: nobody ever waits here for space while holding some.
- A repair (rows promised to a running request and lost) may displace entries *with* interest that
  are finished and have no grant open: EVICTED, the oldest first. So an encoder full of rows that
  wait for a decoder cannot keep out the rows that decoder waits for (docs/adr/0002).
- What is evicted may go on to a second level (`encoder_svc.second_level`), and comes back when it
  is asked for: the space is found then as for a new entry.
- A digest asked for twice is encoded once. While the first medium is still coming in, the second
  stream sends its own copy too; whichever is whole first is encoded. So nobody depends on the
  upload of a stranger.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from chiasm.errors import InvalidRequest, ResourceExhausted, TooLarge
from chiasm.plan import Cause, MediaPlan, Span
from encoder_svc.messages import EncodeJob, EncodeStats, RowBuffer
from encoder_svc.second_level import SecondLevel

_MAX_ENDED = 1 << 16
_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class EncodeOpening:
    """What an Encode stream asks for; `frames` None = the whole medium."""

    encode_id: bytes
    plan: MediaPlan
    frames: Span | None
    rows: Span
    patches: int
    priority: int = 0
    repair: bool = False
    segments: tuple[Span, ...] = ()
    """The rows of each segment, in order, where that is known before they are made."""


class EntryState(StrEnum):
    """The life of an entry: filling -> encoding -> finished; failed from the first two."""

    FILLING = "filling"  # its medium is still coming in
    ENCODING = "encoding"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Segment:
    """Finished rows."""

    rows: Span
    buffer: RowBuffer


@dataclass(slots=True, eq=False)
class Entry:
    """The rows of one frame run of one medium. `watchers` are called after every change."""

    key: bytes
    opening: EncodeOpening
    nbytes: int
    state: EntryState = EntryState.FILLING
    segments: list[Segment] = field(default_factory=list)
    stats: EncodeStats | None = None
    failure: tuple[Cause, str] | None = None
    encodes: set[bytes] = field(default_factory=set)
    fetches: dict[bytes, Callable[[], bool]] = field(default_factory=dict)  # has a grant open?
    watchers: list[Callable[[], None]] = field(default_factory=list)
    spilled: bool = False  # its rows are in the second level

    @property
    def rows(self) -> Span:
        """Its rows of the medium."""
        return self.opening.rows

    @property
    def digest(self) -> bytes:
        """The medium's digest."""
        return self.opening.plan.digest

    @property
    def interest(self) -> int:
        """Open Encode and Fetch streams."""
        return len(self.encodes) + len(self.fetches)

    @property
    def idle(self) -> bool:
        """Whether its rows are ready, and granted to nobody."""
        return self.state is EntryState.FINISHED and not any(f() for f in self.fetches.values())

    def changed(self) -> None:
        """Tells the watchers."""
        for watcher in tuple(self.watchers):
            watcher()


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer to an Encode: its entry, whether it was there, whether the medium is wanted."""

    entry: Entry
    cached: bool
    media_needed: bool


class EmbeddingStore:
    """Owns the entries. Implements `encoder_svc.messages.Sink`.

    Args:
        cache_bytes: Budget of rows, reserved and finished together.
        row_bytes: Bytes of one row.
        max_pending_patches: Patches waiting or running before new work is refused.
        max_pending_media: Bytes of media coming in or being encoded before new work is refused.
        cancel_job: Ends a job by key; nothing of it is reported afterwards.
        second: Where evicted rows go; nowhere unless one is given.
    """

    def __init__(
        self,
        *,
        cache_bytes: int,
        row_bytes: int,
        max_pending_patches: int,
        max_pending_media: int,
        cancel_job: Callable[[bytes], None],
        second: SecondLevel | None = None,
    ) -> None:
        self.cache_bytes = cache_bytes
        self.used_bytes = 0
        self._row_bytes = row_bytes
        self._max_pending_patches = max_pending_patches
        self._max_pending_media = max_pending_media
        self._cancel_job = cancel_job
        self._second = second or SecondLevel()
        self._next_key = 0
        self._entries: dict[tuple[bytes, Span | None], Entry] = {}  # all but failed ones
        # By key. What is asked often looks at these, never at all entries: the cache holds many.
        self._filling: dict[bytes, Entry] = {}  # whose medium is coming in
        self._jobs: dict[bytes, Entry] = {}  # that the engine works on
        self._cold: OrderedDict[bytes, Entry] = OrderedDict()  # no interest; oldest first
        self._cold_bytes = 0
        self._failed: dict[bytes, Entry] = {}  # until their last stream has gone
        self._encodes: dict[bytes, Entry] = {}  # by encode id: open Encode streams
        self._ended: OrderedDict[bytes, None] = OrderedDict()

    # Encode streams.

    def admit(self, opening: EncodeOpening, *, pending_patches: int) -> Admission:
        """Opens an Encode stream's interest.

        Args:
            opening: What is asked for.
            pending_patches: What the engine has to do already.

        Raises:
            ResourceExhausted: No space, or too much work; nothing was started, nothing dropped.
            TooLarge: It would not fit into an empty store either.
            InvalidRequest: The encode id was used before, or the digest names another plan.
        """
        if opening.encode_id in self._encodes or opening.encode_id in self._ended:
            raise InvalidRequest("this encode id was used before")
        name = (opening.plan.digest, opening.frames)
        entry = self._entries.get(name)
        cached = entry is not None
        if entry is None:
            entry = self._create(opening, pending_patches)
            self._entries[name] = self._filling[entry.key] = entry
        elif (entry.opening.plan, entry.rows) != (opening.plan, opening.rows):
            raise InvalidRequest("the same digest came with another plan")
        elif entry.spilled:
            self._bring_back(entry, displace=opening.repair)
        self._encodes[opening.encode_id] = entry
        entry.encodes.add(opening.encode_id)
        if self._cold.pop(entry.key, None):
            self._cold_bytes -= entry.nbytes
        return Admission(entry, cached, entry.state is EntryState.FILLING)

    def media_complete(self, encode_id: bytes, media: bytes) -> EncodeJob | None:
        """The stream's medium is whole: the job to submit, or None when another was first."""
        entry = self._encodes[encode_id]
        if entry.state is not EntryState.FILLING:
            return None
        entry.state = EntryState.ENCODING
        self._jobs[entry.key] = self._filling.pop(entry.key)
        opening = entry.opening
        return EncodeJob(
            entry.key, opening.plan, opening.frames, opening.rows, media, opening.priority
        )

    def end_encode(self, encode_id: bytes) -> None:
        """The Encode stream is over, for whatever reason."""
        entry = self._encodes.pop(encode_id)
        entry.encodes.remove(encode_id)
        self._ended[encode_id] = None
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)
        self._interest_gone(entry)

    # Fetch streams.

    def find(self, encode_id: bytes) -> Entry | None:
        """The entry of an open Encode stream."""
        return self._encodes.get(encode_id)

    def has_ended(self, encode_id: bytes) -> bool:
        """Whether an Encode stream of that id was here and is over."""
        return encode_id in self._ended

    def open_fetch(self, entry: Entry, fetch_id: bytes, *, has_grants: Callable[[], bool]) -> None:
        """A Fetch stream's interest begins."""
        entry.fetches[fetch_id] = has_grants

    def end_fetch(self, entry: Entry, fetch_id: bytes) -> None:
        """The fetch has ended and writes no more."""
        del entry.fetches[fetch_id]
        self._interest_gone(entry)

    # What the engine reports (`Sink`).

    def segment_ready(self, key: bytes, segment: int, rows: Span, buffer: RowBuffer) -> None:
        """Checks a segment against the plan and takes it in; a wrong one fails the entry."""
        entry = self._jobs.get(key)
        if entry is None:
            return
        edge = entry.segments[-1].rows.end if entry.segments else entry.rows.begin
        fits = rows.begin == edge and edge < rows.end <= entry.rows.end
        size = len(rows) * self._row_bytes
        fits = fits and rows in (entry.opening.segments[segment : segment + 1] or (rows,))
        if not fits or segment != len(entry.segments) or buffer.nbytes != size:
            self._cancel_job(key)
            self.failed(key, Cause.LOST, "the encoder made rows that its plan does not have")
            return
        entry.segments.append(Segment(rows, buffer))
        entry.changed()

    def finished(self, key: bytes, stats: EncodeStats) -> None:
        """Every segment is there."""
        entry = self._jobs.get(key)
        if entry is None:
            return
        if not entry.segments or entry.segments[-1].rows.end != entry.rows.end:
            self.failed(key, Cause.LOST, "the encoder made fewer rows than its plan has")
            return
        del self._jobs[key]
        entry.state = EntryState.FINISHED
        entry.stats = stats
        entry.changed()

    def failed(self, key: bytes, cause: Cause, message: str) -> None:
        """The entry leaves the index, so that a later Encode starts afresh."""
        entry = self._jobs.pop(key, None)
        if entry is None:
            return
        entry.state = EntryState.FAILED
        entry.failure = (cause, message)
        del self._entries[entry.digest, entry.opening.frames]
        self._failed[entry.key] = entry
        entry.changed()
        self._interest_gone(entry)

    # Facts.

    @property
    def filling_patches(self) -> int:
        """Patches of media that are still coming in."""
        return sum(e.opening.patches for e in self._filling.values())

    @property
    def num_encodes(self) -> int:
        """Open Encode streams."""
        return len(self._encodes)

    @property
    def num_fetches(self) -> int:
        """Open Fetch streams that have found their entry."""
        return sum(len(e.fetches) for e in (*self._entries.values(), *self._failed.values()))

    @property
    def free_bytes(self) -> int:
        """Bytes that could be reserved now, by evicting what nobody is interested in."""
        return self.cache_bytes - self.held_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes reserved for entries that someone is interested in. Any thread may ask."""
        return self.used_bytes - self._cold_bytes

    def check(self) -> None:
        """Raises AssertionError when bytes or interest do not add up."""
        entries = (*self._entries.values(), *self._failed.values())
        here = sum(entry.nbytes for entry in entries if not entry.spilled)
        assert self.used_bytes == here <= self.cache_bytes
        self._second.check()
        for entry in entries:
            cold = entry.key in self._cold or entry.spilled
            assert cold == (entry.interest == 0), "cold entries are those without interest"
            assert not cold or entry.state is EntryState.FINISHED, "only finished rows are cache"
            assert (entry.key in self._filling) == (entry.state is EntryState.FILLING)
            assert (entry.key in self._jobs) == (entry.state is EntryState.ENCODING)
        assert self._cold_bytes == sum(e.nbytes for e in self._cold.values())
        opened = {id for entry in entries for id in entry.encodes}
        assert opened == set(self._encodes), "interest differs from the open Encode streams"
        assert not self._ended.keys() & self._encodes.keys()

    def _create(self, opening: EncodeOpening, pending_patches: int) -> Entry:
        pending = pending_patches + self.filling_patches
        if pending and pending + opening.patches > self._max_pending_patches:
            raise ResourceExhausted(
                f"{pending} patches are waiting already", retry_after_s=_RETRY_AFTER_S
            )
        unfinished = (*self._filling.values(), *self._jobs.values())
        media = sum(e.opening.plan.media_bytes for e in unfinished)
        if media and media + opening.plan.media_bytes > self._max_pending_media:
            raise ResourceExhausted(
                f"{media} bytes of media are waiting already", retry_after_s=_RETRY_AFTER_S
            )
        nbytes = len(opening.rows) * self._row_bytes
        if nbytes > self.cache_bytes:
            raise TooLarge(f"{nbytes} bytes of rows are more than this encoder can hold")
        self._make_room(nbytes, displace=opening.repair)
        self.used_bytes += nbytes
        self._next_key += 1
        return Entry(self._next_key.to_bytes(8, "big"), opening, nbytes)

    def _make_room(self, nbytes: int, *, displace: bool) -> None:
        idle = [e for e in self._entries.values() if e.interest and e.idle] if displace else []
        if nbytes > self.free_bytes + sum(e.nbytes for e in idle):
            raise ResourceExhausted(
                "every row held is waited for by someone", retry_after_s=_RETRY_AFTER_S
            )
        while self._cold and self.used_bytes + nbytes > self.cache_bytes:
            _, victim = self._cold.popitem(last=False)
            self._cold_bytes -= victim.nbytes
            self.used_bytes -= victim.nbytes
            for lost in self._second.put(victim):
                del self._entries[lost.digest, lost.opening.frames]
                lost.segments.clear()  # now, not when the streams that knew it are collected
        # The longest there go first, but first attempts before other repairs.
        for entry in sorted(idle, key=lambda e: e.opening.repair):
            if self.used_bytes + nbytes > self.cache_bytes:
                self._displace(entry)

    def _bring_back(self, entry: Entry, *, displace: bool) -> None:
        """From the second level. Raises ResourceExhausted, and leaves it there."""
        self._second.take_out(entry)  # what makes room for it must not push it out
        try:
            self._make_room(entry.nbytes, displace=displace)
        except ResourceExhausted:
            self._second.put_back(entry)
            raise
        self.used_bytes += entry.nbytes
        self._second.restore(entry)

    def _displace(self, entry: Entry) -> None:
        """Its streams hear EVICTED; its bytes are free now, for nothing of it is being written."""
        self._drop(entry)
        entry.nbytes = 0
        entry.state = EntryState.FAILED
        entry.failure = (Cause.EVICTED, "the rows made room for a running request")
        self._failed[entry.key] = entry
        entry.changed()
        self._interest_gone(entry)

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry.digest, entry.opening.frames]
        self.used_bytes -= entry.nbytes
        entry.segments.clear()

    def _interest_gone(self, entry: Entry) -> None:
        if entry.interest:
            return
        match entry.state:
            case EntryState.FINISHED:
                self._cold[entry.key] = entry
                self._cold_bytes += entry.nbytes
            case EntryState.FAILED:
                if self._failed.pop(entry.key, None):
                    self.used_bytes -= entry.nbytes
                    entry.segments.clear()
            case EntryState.FILLING | EntryState.ENCODING:
                self._filling.pop(entry.key, None)
                if self._jobs.pop(entry.key, None):
                    self._cancel_job(entry.key)
                self._drop(entry)
