"""One Fetch stream, as a pure state machine: what may be written, and when writing has stopped.

    waiting -> serving -> stopping -> ended
    (its encode (ready,    (a write is  (Quiesced was said,
     is unknown) grants)    under way)   or the stream is gone)

Segments that are known before they are made may be granted before they are ready; such grants wait
here for their rows. Rows are written one grant at a time. Ended means: nothing of this fetch is
written any more, or ever will be; that is what Quiesced and the answer to a Fence say. A grant of
the decoder's memory that cannot be written is given back (Unwritten), and so are all further ones:
what is left of the fetch travels on the stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from chiasm.plan import Cause, Span
from chiasm.rows import RowFormat
from chiasm.transport.base import STREAM, Destination
from chiasm.v1 import encoder_pb2
from encoder_svc.messages import RowBuffer
from encoder_svc.store import Entry


@dataclass(frozen=True, slots=True)
class FetchOpening:
    """What a Fetch stream asks for."""

    fetch_id: bytes
    digest: bytes
    rows: Span
    encode_id: bytes
    encoder_epoch: int
    format: RowFormat

    @classmethod
    def from_proto(cls, message: encoder_pb2.FetchOpen) -> FetchOpening:
        """Raises ValueError for values that cannot be."""
        rows = Span.from_proto(message.rows)
        if not message.fetch_id or not len(rows):
            raise ValueError("a fetch needs an id and rows")
        return cls(
            fetch_id=message.fetch_id,
            digest=message.digest,
            rows=rows,
            encode_id=message.encode_id,
            encoder_epoch=message.encoder_epoch,
            format=RowFormat.from_proto(message.rows_format),
        )


@dataclass(frozen=True, slots=True)
class _Granted:
    segment: int
    seq: int
    destinations: tuple[Destination, ...]

    @property
    def on_stream(self) -> bool:
        """Whether its rows travel on the Fetch stream itself."""
        return self.destinations[0].memory_type == STREAM


@dataclass(frozen=True, slots=True)
class Write:
    """The shell's order: write one grant, then call `write_ended`."""

    segment: int
    seq: int
    rows: Span  # of the whole segment
    buffer: RowBuffer
    destinations: tuple[Destination, ...]

    @property
    def on_stream(self) -> bool:
        """Whether its rows travel on the Fetch stream itself."""
        return self.destinations[0].memory_type == STREAM


class SessionState(StrEnum):
    """See the module's picture."""

    WAITING = "waiting"
    SERVING = "serving"
    STOPPING = "stopping"
    ENDED = "ended"


class FetchSession:
    """Decides; the shell around it reads, writes and sends in the order of `take`.

    Args:
        opening: What the decoder asked for.
        memory_types: Which memory of this decoder can be written, best first; None = `reached` will
            tell, and until then nothing is said of any row.
    """

    def __init__(self, opening: FetchOpening, *, memory_types: tuple[str, ...] | None = ()) -> None:
        self.opening = opening
        self.state = SessionState.WAITING
        self.entry: Entry | None = None
        self.wake: Callable[[], None] = lambda: None  # set by the shell: there is something to do
        self.on_end: list[Callable[[], None]] = []  # called once, when it has ended
        self._memory_types = memory_types
        self._epoch: int | None = None  # once accepted
        self._greeted = False
        self._streaming = False  # memory could not be written
        self._aborted = False
        self._muted = False
        self._outputs: deque[encoder_pb2.FetchResponse | Write] = deque()
        # Segments that may be granted, cut to the opened rows: those told and those known ahead.
        self._open: dict[int, Span] = {}
        self._num_seen = 0
        self._granted = bytearray(len(opening.rows))  # one flag a row
        self._pending: list[_Granted] = []  # by seq
        self._active: Write | None = None
        self._num_grants = 0
        self._no_more_grants = False

    @property
    def stopping(self) -> bool:
        """Whether a write under way should be cut short."""
        return self.state in (SessionState.STOPPING, SessionState.ENDED)

    @property
    def ended(self) -> bool:
        """Whether nothing is written any more, or ever will be."""
        return self.state is SessionState.ENDED

    def has_grants(self) -> bool:
        """Whether a grant is being written or waits to be."""
        return self._active is not None or bool(self._pending)

    def take(self) -> encoder_pb2.FetchResponse | Write | None:
        """The next response to send or write to make; what is not taken may be withdrawn.

        None when there is nothing more.
        """
        return self._outputs.popleft() if self._outputs else None

    def take_write(self) -> Write | None:
        """The write to make, if it is all that there is to take."""
        if len(self._outputs) == 1 and isinstance(self._outputs[0], Write):
            self._outputs.clear()
            return self._active
        return None

    # What happens.

    def attach(self, entry: Entry) -> None:
        """The Encode stream it names is here."""
        assert self.state is SessionState.WAITING
        rows = self.opening.rows
        if entry.digest != self.opening.digest:
            self.fail(Cause.LOST, "the encode id belongs to another digest")
        elif rows.intersect(entry.rows) != rows:
            self.fail(Cause.LOST, "the encode id covers other rows")
        else:
            self.entry = entry
            self.state = SessionState.SERVING

    def accept(self, epoch: int) -> None:
        """After `attach`: tells the decoder, and what is ready already."""
        self._epoch = epoch
        self._greet()

    def reached(self, memory_types: tuple[str, ...]) -> None:
        """It is known which memory of the decoder can be written, best first."""
        self._memory_types = memory_types
        self._greet()

    def refresh(self) -> None:
        """The entry has changed: tells of new segments, or of its failure."""
        if self.state is not SessionState.SERVING or self.entry is None:
            return
        first = self._num_seen if self._greeted else len(self.entry.segments)
        for index in range(first, len(self.entry.segments)):
            self._segment_ready(index, self.entry.segments[index].rows)
        self._num_seen = len(self.entry.segments) if self._greeted else 0
        if self.entry.failure is not None:
            self.fail(*self.entry.failure)
        elif self._pending:
            self._next_write()

    def grace_over(self) -> None:
        """The Encode stream it names did not come in time."""
        if self.state is SessionState.WAITING:
            self.fail(Cause.LOST, "no such encode id here")

    def grant(self, message: encoder_pb2.FetchGrant) -> None:
        """Takes one grant in; a wrong one ends this fetch, and this fetch only."""
        if self.stopping:
            return
        self._num_grants += 1
        try:
            destinations = self._checked(message)
        except ValueError as error:
            self.fail(Cause.LOST, f"wrong grant: {error}")
            return
        assert self.entry is not None
        granted = _Granted(message.segment, self._num_grants, destinations)
        if self._streaming and not granted.on_stream:  # it crossed our word that this is over
            self._give_back(granted, aborted=False)
            return
        self._pending.append(granted)
        self._next_write()

    def cancel(self) -> None:
        """The decoder wants no more, or a Fence came."""
        self._stop()

    def half_closed(self) -> None:
        """No further grant will come: what was granted is still written, then the fetch ends."""
        self._no_more_grants = True
        if self.state in (SessionState.WAITING, SessionState.SERVING):
            self._next_write()

    def broke(self) -> None:
        """The stream is gone: nobody hears what is said."""
        self._muted = True
        self._stop()
        self._outputs.clear()

    def fail(self, cause: Cause, message: str) -> None:
        """Gives the fetch up with a cause."""
        if not self.stopping:
            error = encoder_pb2.ItemError(cause=cause.to_proto(), message=message)
            self._say(encoder_pb2.FetchResponse(error=error))
            self._stop()

    def write_ended(self, crc32: int | None) -> None:
        """The write under way is over: every byte of it, or (None) cut short."""
        write, self._active = self._active, None
        assert write is not None, "no write was under way"
        if self.stopping:
            self._end()
        elif crc32 is None:
            self.fail(Cause.LOST, "rows could not be written")
        else:
            written = encoder_pb2.FetchWritten(segment=write.segment, seq=write.seq, crc32=crc32)
            self._say(encoder_pb2.FetchResponse(written=written))
            self._next_write()

    def write_failed(self, *, aborted: bool) -> None:
        """The write under way is over; the decoder's memory cannot be written (`WriteFailed`)."""
        write, self._active = self._active, None
        assert write is not None, "no write was under way"
        self._aborted |= aborted
        self._streaming = True
        if self.stopping:
            self._end()
            return
        self._give_back(write, aborted=aborted)
        for other in tuple(self._pending):
            if not other.on_stream:
                self._pending.remove(other)
                self._give_back(other, aborted=False)
        self._next_write()

    def check(self) -> None:
        """Raises AssertionError when something could be written after the end."""
        if self.stopping:
            assert not self._pending
        if self.ended:
            assert self._active is None

    # How it is done.

    def _greet(self) -> None:
        if self._epoch is None or self._memory_types is None or self.stopping:
            return
        self._greeted = True
        assert self.entry is not None
        ahead = self.entry.opening.segments
        for index, rows in enumerate(ahead):
            self._open[index] = rows.intersect(self.opening.rows)
        accepted = encoder_pb2.FetchAccepted(
            encoder_epoch=self._epoch,
            memory_types=self._memory_types,
            segments=[rows.to_proto() for rows in ahead],
        )
        self._say(encoder_pb2.FetchResponse(accepted=accepted))
        self.refresh()

    def _segment_ready(self, index: int, rows: Span) -> None:
        """Tells of it, unless all of it was granted before."""
        rows = self._open[index] = rows.intersect(self.opening.rows)
        first = self.opening.rows.begin
        if not all(self._granted[rows.begin - first : rows.end - first]):
            ready = encoder_pb2.FetchReady(
                segment=index, rows=rows.to_proto(), format=self.opening.format.to_proto()
            )
            self._say(encoder_pb2.FetchResponse(ready=ready))

    def _checked(self, message: encoder_pb2.FetchGrant) -> tuple[Destination, ...]:
        segment = self._open.get(message.segment)
        if segment is None:
            raise ValueError(f"segment {message.segment} is not ready")
        if not message.destinations:
            raise ValueError("no destination")
        destinations = tuple(Destination.from_proto(d) for d in message.destinations)
        if len({place.memory_type for place in destinations}) > 1:
            raise ValueError("memory of several types in one grant")
        first = self.opening.rows.begin
        for place in destinations:
            rows = place.rows
            if not len(rows) or rows.intersect(segment) != rows:
                raise ValueError(f"rows [{rows.begin}, {rows.end}) are not in the segment")
            if place.length != len(rows) * self.opening.format.row_bytes:
                raise ValueError(f"{place.length} bytes for {len(rows)} rows")
            if place.memory_type not in (STREAM, *(self._memory_types or ())):
                raise ValueError(f"memory type {place.memory_type!r} is not served here")
            flags = slice(rows.begin - first, rows.end - first)
            if any(self._granted[flags]):
                raise ValueError(f"rows [{rows.begin}, {rows.end}) were granted before")
            self._granted[flags] = b"\1" * len(rows)
        return destinations

    def _give_back(self, write: Write | _Granted, *, aborted: bool) -> None:
        """Its rows may be granted again."""
        for place in write.destinations:
            at = place.rows.begin - self.opening.rows.begin
            self._granted[at : at + len(place.rows)] = bytes(len(place.rows))
        unwritten = encoder_pb2.FetchUnwritten(
            segment=write.segment, seq=write.seq, aborted=aborted
        )
        self._say(encoder_pb2.FetchResponse(unwritten=unwritten))

    def _next_write(self) -> None:
        if self._active is not None:
            return
        granted = self._next_writable()
        if granted is not None:
            assert self.entry is not None
            self._pending.remove(granted)
            segment = self.entry.segments[granted.segment]
            self._active = Write(
                granted.segment, granted.seq, segment.rows, segment.buffer, granted.destinations
            )
            self._outputs.append(self._active)
            self.wake()
        elif self._pending:
            return
        elif self._no_more_grants or all(self._granted):
            self._say(encoder_pb2.FetchResponse(done=encoder_pb2.FetchDone()))
            self._end()

    def _next_writable(self) -> _Granted | None:
        """The oldest grant whose rows are there; on the stream none overtakes another."""
        assert self.entry is not None or not self._pending
        stream_waits = False
        for granted in self._pending:
            if granted.on_stream and stream_waits:
                continue
            if self.entry is not None and granted.segment < self._num_seen:
                return granted
            stream_waits = stream_waits or granted.on_stream
        return None

    def _stop(self) -> None:
        if self.stopping:
            return
        self.state = SessionState.STOPPING
        self._pending.clear()
        if self._active is not None and self._active in self._outputs:  # ordered, but not begun
            self._outputs.remove(self._active)
            self._active = None
        if self._active is None:
            self._end()
        self.wake()

    def _end(self) -> None:
        self.state = SessionState.ENDED
        quiesced = encoder_pb2.FetchQuiesced(aborted=self._aborted)
        self._say(encoder_pb2.FetchResponse(quiesced=quiesced))
        for callback in self.on_end:
            callback()

    def _say(self, response: encoder_pb2.FetchResponse) -> None:
        if not self._muted:
            self._outputs.append(response)
        self.wake()
