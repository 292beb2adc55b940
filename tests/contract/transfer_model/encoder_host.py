"""One encoder process of the model: the real store and fetch table, a pretended tower."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from chiasm.errors import ChiasmError, ResourceExhausted
from chiasm.fakes.network import Link, Network
from chiasm.plan import Cause, MediaPlan, Modality, Span
from chiasm.rows import RowFormat
from chiasm.transport import DRAM
from chiasm.v1 import encoder_pb2
from decoder_svc.embeddings.events import Grant
from encoder_svc.fetch_session import FetchOpening, FetchSession, Write
from encoder_svc.fetch_table import FetchTable
from encoder_svc.messages import EncodeJob, EncodeStats
from encoder_svc.store import EmbeddingStore, EncodeOpening

FORMAT = RowFormat(1, 1, "float16")
ROW = FORMAT.row_bytes
SEGMENT_ROWS = 3
CACHE_ROWS = 12


class Violation(AssertionError):
    """The contract was broken."""


@dataclass(frozen=True)
class Rows:
    """Implements `RowBuffer` by naming its rows; the model moves names, not bytes."""

    digest: bytes
    num_rows: int

    @property
    def nbytes(self) -> int:
        return self.num_rows * ROW

    def read(self, begin: int, end: int) -> memoryview:
        raise AssertionError("the model reads no bytes")


def media_plan(digest: bytes, num_rows: int) -> MediaPlan:
    return MediaPlan(digest, "f", Modality.VIDEO, 1, 1, 1, 1, (), num_rows, 1, "video/mp4")


@dataclass(eq=False)
class FetchWire:
    """One Fetch stream: both directions, and who sits at the far end."""

    fetch_id: bytes
    write_row: Callable[[bytes, int, bytes, int], None]  # fetch id, address, digest, row
    up: Link = field(init=False)
    down: Link = field(init=False)
    notices: Link = field(init=False)  # what the receiving memory is told of whole grants
    session: FetchSession | None = None
    broken: bool = False  # as the decoder sees it
    dead: bool = False  # the process behind it is gone
    sent: list[Grant] = field(default_factory=list)  # as the encoder counts them
    on_stream: set[int] = field(default_factory=set)  # numbers of grants of the stream
    streaming: bool = False  # memory could not be written: the decoder grants the stream


@dataclass(eq=False)
class EncodeWire:
    """One Encode stream."""

    encode_id: bytes
    up: Link = field(init=False)
    down: Link = field(init=False)
    admitted: bool = False
    dead: bool = False
    told: str = ""


@dataclass(eq=False)
class PostedWrite:
    """A write that the hardware has taken: it goes on row by row, whatever the streams do."""

    wire: FetchWire
    write: Write
    rows: list[tuple[int, int]]  # address, row


@dataclass(frozen=True)
class EncodeStart:
    """The gateway's first message."""

    opening: EncodeOpening
    epoch: int  # 0 = any


class EncoderHost:
    """A process at one address; `restart` is its death and its next life."""

    def __init__(self, name: str, network: Network) -> None:
        self.name = name
        self.epoch = 0
        self._network = network
        self._wires: list[FetchWire | EncodeWire] = []
        self._boot()

    def _boot(self) -> None:
        self.epoch += 1
        self.jobs: dict[bytes, EncodeJob] = {}
        self.progress: dict[bytes, tuple[int, int]] = {}  # segments and rows done
        self.posted: list[PostedWrite] = []
        self._dirty: list[FetchWire] = []
        self.store = EmbeddingStore(
            cache_bytes=CACHE_ROWS * ROW,
            row_bytes=ROW,
            max_pending_patches=1000,
            max_pending_media=1000,
            cancel_job=self._cancel_job,
        )
        self.table = FetchTable(self.store, epoch=self.epoch, row_format=FORMAT)

    def _cancel_job(self, key: bytes) -> None:
        self.jobs.pop(key, None)
        self.progress.pop(key, None)

    def restart(self) -> None:
        """Dies and comes back. Openings not yet read reach the next life (gRPC retries them)."""
        survivors: list[FetchWire | EncodeWire] = []
        for wire in self._wires:
            begun = wire.session is not None if isinstance(wire, FetchWire) else wire.admitted
            if not begun and not wire.dead:
                survivors.append(wire)
                continue
            wire.dead = True
            wire.up.drop()
            wire.down.drop()
            wire.down.send("broken")
        self._wires = survivors
        self._boot()

    @property
    def encodes(self) -> list[EncodeWire]:
        """Encode streams that were admitted and are open."""
        return [w for w in self._wires if isinstance(w, EncodeWire) and w.admitted]

    @property
    def granted_ahead(self) -> bool:
        """Whether a grant waits here for its rows."""
        return any(
            grant.segment >= len(session.entry.segments)
            for session in self.table._sessions.values()
            if session.entry is not None
            for grant in session._pending
        )

    # Encode streams.

    def open_encode(self, wire: EncodeWire, deliver: Callable[[object], None]) -> None:
        wire.up = self._network.link(lambda message: self._on_encode(wire, message))
        wire.down = self._network.link(deliver)
        self._wires.append(wire)

    def _on_encode(self, wire: EncodeWire, message: object) -> None:
        if wire.dead:
            return
        if isinstance(message, EncodeStart):
            self._admit(wire, message)
        elif message == "media":
            if wire.admitted:
                job = self.store.media_complete(wire.encode_id, b"m")
                if job is not None:
                    self.jobs[job.key] = job
                    self.progress[job.key] = (0, job.rows.begin)
        else:  # half-closed, cancelled, or broken: interest ends
            wire.dead = True
            self._wires.remove(wire)
            if wire.admitted:
                self.store.end_encode(wire.encode_id)
        self.flush()

    def _admit(self, wire: EncodeWire, start: EncodeStart) -> None:
        if start.epoch not in (0, self.epoch):
            wire.down.send("refused")
            return
        try:
            admission = self.store.admit(start.opening, pending_patches=len(self.jobs))
        except ChiasmError as error:
            wire.down.send("full" if isinstance(error, ResourceExhausted) else "refused")
            return
        wire.admitted = True
        entry = admission.entry
        self.table.encode_began(wire.encode_id)
        wire.down.send("media_needed" if admission.media_needed else "joined")

        def watch() -> None:
            if entry.failure is not None and not wire.dead and not wire.told:
                wire.told = "failed"
                wire.down.send(("failed", entry.failure[0]))

        entry.watchers.append(watch)

    # The tower.

    def work(self, key: bytes, *, fail: Cause | None = None) -> None:
        """One step of one job: a segment, the end, or a failure."""
        job = self.jobs[key]
        segment, row = self.progress[key]
        if fail is not None:
            self._cancel_job(key)
            self.store.failed(key, fail, "made to fail")
        elif row == job.rows.end:
            self._cancel_job(key)
            self.store.finished(key, EncodeStats(1, 1, 1))
        else:
            rows = Span(row, min(row + SEGMENT_ROWS, job.rows.end))
            self.progress[key] = (segment + 1, rows.end)
            self.store.segment_ready(key, segment, rows, Rows(job.plan.digest, len(rows)))
        self.flush()

    # Fetch streams.

    def open_fetch(
        self,
        wire: FetchWire,
        deliver: Callable[[object], None],
        notify: Callable[[int], None],
    ) -> None:
        wire.up = self._network.link(lambda message: self._on_fetch(wire, message))
        wire.down = self._network.link(deliver)
        wire.notices = self._network.link(notify)
        self._wires.append(wire)

    def _on_fetch(self, wire: FetchWire, message: object) -> None:
        if wire.dead:
            return
        session = wire.session
        if isinstance(message, FetchOpening):
            session = wire.session = self.table.open(message, memory_types=(DRAM,))
            session.wake = lambda: self._dirty.append(wire)
            self._dirty.append(wire)
            if message.encoder_epoch != self.epoch and not session.ended:
                raise Violation("a fetch meant for another life was taken in")
        elif session is None:  # broken before it was opened
            wire.dead = True
        elif isinstance(message, encoder_pb2.FetchGrant):
            session.grant(message)
        elif message == "cancel":
            session.cancel()
        else:
            session.broke()
        self.flush()

    def grace_over(self) -> None:
        """Fetches that wait for an Encode give up."""
        for wire in self._wires:
            if isinstance(wire, FetchWire) and wire.session is not None:
                wire.session.grace_over()
        self.flush()

    def flush(self) -> None:
        """Sends what sessions say and posts what they order."""
        while self._dirty:
            wire = self._dirty.pop()
            if wire.session is None or wire.dead:
                continue
            for output in iter(wire.session.take, None):
                if isinstance(output, Write):
                    rows = [
                        (place.address + i * ROW, place.rows.begin + i)
                        for place in output.destinations
                        for i in range(len(place.rows))
                    ]
                    self.posted.append(PostedWrite(wire, output, rows))
                elif not wire.broken:
                    wire.down.send(output)
            if wire.session.ended and wire in self._wires:
                self._wires.remove(wire)

    def write(self, posted: PostedWrite, *, cut: bool = False) -> None:
        """The hardware writes one row; a write may be cut short only when its fetch is stopping."""
        session = posted.wire.session
        assert session is not None
        stopped = cut and session.stopping
        if stopped:
            posted.rows.clear()
        else:
            address, row = posted.rows.pop(0)
            posted.wire.write_row(posted.wire.fetch_id, address, session.opening.digest, row)
        if not posted.rows:
            self.posted.remove(posted)
            if not (stopped or posted.write.on_stream):
                posted.wire.notices.send(posted.write.seq)
            session.write_ended(None if stopped else 0)
            self._dirty.append(posted.wire)
            self.flush()

    def refuse(self, posted: PostedWrite) -> None:
        """The memory cannot be written any more; on the stream there is nothing to refuse."""
        session = posted.wire.session
        assert session is not None
        if not posted.write.on_stream:
            self.posted.remove(posted)
            session.write_failed(aborted=False)
            self._dirty.append(posted.wire)
            self.flush()

    def fenced(self, fetch_id: bytes, epoch: int) -> bool:
        """A Fence call: whether it can be answered."""
        if epoch != self.epoch:
            return True
        session = self.table.fence(fetch_id)
        self.flush()
        return session is None

    def check(self) -> None:
        self.store.check()
        self.table.check()
