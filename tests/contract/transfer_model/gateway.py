"""The gateway of the model: opens Encodes, promises, redirects, hedges, gives up after a while."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from chiasm.fakes.network import Network
from chiasm.plan import Cause, Part, Promise, Source, Span
from decoder_svc.embeddings.events import ItemLanded, Notice
from encoder_svc.geometry import segments_of
from encoder_svc.store import EncodeOpening
from tests.contract.transfer_model.decoder_host import DecoderHost
from tests.contract.transfer_model.encoder_host import (
    SEGMENT_ROWS,
    EncoderHost,
    EncodeStart,
    EncodeWire,
    media_plan,
)

MAX_ATTEMPTS = 6
MAX_REFUSALS = 4
MAX_RECALLS = 40


@dataclass(eq=False)
class PartJob:
    """One part of one item, and its open Encodes."""

    item: int
    part: int
    rows: Span
    frames: Span | None
    digest: bytes
    num_rows: int
    attempt: int = 0
    num_lost: int = 0
    num_recalls: int = 0  # rows given up by the system itself: EVICTED, PREEMPTED
    num_refused: int = 0
    encodes: list[EncodeWire] = field(default_factory=list)


@dataclass(eq=False)
class Job:
    """One request. `outcome` is empty while it runs."""

    request_id: str
    decoder: DecoderHost
    parts: list[PartJob]
    outcome: str = ""
    landed: set[int] = field(default_factory=set)


class Gateway:
    """Keeps no promise the services do not keep: its messages may come late and out of order."""

    def __init__(self, hosts: Mapping[str, EncoderHost], network: Network) -> None:
        self.jobs: dict[str, Job] = {}
        self.later: list[Callable[[], None]] = []  # what waits for an encoder to have space
        self._hosts = hosts
        self._names = sorted(hosts)
        self._network = network
        self._num_encodes = 0

    @property
    def running(self) -> list[Job]:
        return [job for job in self.jobs.values() if not job.outcome]

    def start(
        self, decoder: DecoderHost, items: Sequence[tuple[bytes, int, int]], pick: int
    ) -> None:
        """A request with media of (digest, rows, parts) each."""
        job = Job(f"r{len(self.jobs)}", decoder, [])
        self.jobs[job.request_id] = job
        promises = []
        for item, (digest, num_rows, num_parts) in enumerate(items):
            size = -(-num_rows // num_parts)
            parts = []
            for part, begin in enumerate(range(0, num_rows, size)):
                rows = Span(begin, min(begin + size, num_rows))
                frames = Span(part, part + 1) if num_parts > 1 else None
                state = PartJob(item, part, rows, frames, digest, num_rows)
                job.parts.append(state)
                source = self._encode(job, state, pick + part)
                parts.append(Part(part, rows, source, frames, state.attempt))
            promises.append(Promise(item, media_plan(digest, num_rows), 0, tuple(parts)))
        decoder.add(job.request_id, promises)

    def _encode(self, job: Job, part: PartJob, pick: int) -> Source:
        part.attempt += 1
        self._num_encodes += 1
        host = self._hosts[self._names[pick % len(self._names)]]
        wire = EncodeWire(f"e{self._num_encodes}".encode())
        host.open_encode(wire, partial(self._on_encode, job, part, wire, part.attempt))
        part.encodes.append(wire)
        plan = media_plan(part.digest, part.num_rows)
        repair = part.num_lost + part.num_recalls > 0
        segments = segments_of([len(part.rows)], first=part.rows.begin, most=SEGMENT_ROWS)
        opening = EncodeOpening(
            wire.encode_id, plan, part.frames, part.rows, 1, repair=repair, segments=segments
        )
        wire.up.send(EncodeStart(opening, host.epoch if pick % 2 else 0))
        return Source(wire.encode_id, host.name, host.epoch)

    def _on_encode(
        self, job: Job, part: PartJob, wire: EncodeWire, attempt: int, message: object
    ) -> None:
        if wire not in part.encodes or job.outcome:
            return
        if message == "media_needed":
            wire.up.send("media")
            return
        if message == "joined":
            return
        part.encodes.remove(wire)
        if not wire.dead:
            wire.up.send("end")
        if isinstance(message, tuple) and not message[1].retryable:
            self.fail(job, f"{message[1]}")
        elif message == "full":
            part.num_refused += 1
            if part.num_refused > MAX_REFUSALS:
                self.fail(job, "encoders full")
            elif attempt == part.attempt:
                self.later.append(partial(self._retry_later, job, part, attempt))
        elif attempt == part.attempt:
            cause = message[1] if isinstance(message, tuple) else Cause.LOST
            self.retry(job, part, attempt, cause)

    def on_notice(self, decoder: DecoderHost, notice: Notice) -> None:
        job = self.jobs[notice.request_id]
        if job.outcome:
            return
        if isinstance(notice, ItemLanded):
            job.landed.add(notice.item)
            for part in job.parts:
                if part.item == notice.item:
                    self._close(part)
            return
        job.landed.discard(notice.item)
        part = next(p for p in job.parts if (p.item, p.part) == (notice.item, notice.part))
        if not notice.cause.retryable:
            self.fail(job, f"{notice.cause}")
        elif notice.attempt == part.attempt:
            self.retry(job, part, notice.attempt + len(job.request_id), notice.cause)

    def retry(self, job: Job, part: PartJob, pick: int, cause: Cause = Cause.LOST) -> None:
        """Another Encode, and a Redirect to it."""
        recall = cause in (Cause.EVICTED, Cause.PREEMPTED)
        part.num_lost += not recall
        part.num_recalls += recall
        if part.num_lost > MAX_ATTEMPTS or part.num_recalls > MAX_RECALLS:
            self.fail(job, f"{cause} too often")
        elif cause is Cause.EVICTED:
            # Encoders are short of space: asking again at once would evict others in turn.
            self._close(part)
            self.later.append(partial(self._retry_later, job, part, part.attempt))
        else:
            self._move(job, part, pick)

    def _retry_later(self, job: Job, part: PartJob, attempt: int) -> None:
        if not job.outcome and attempt == part.attempt and part.item not in job.landed:
            self._move(job, part, attempt)

    def _move(self, job: Job, part: PartJob, pick: int) -> None:
        self._close(part)
        source = self._encode(job, part, pick)
        self._later(partial(self._redirect, job, replace(part), source))

    def hedge(self, job: Job, part: PartJob, pick: int) -> None:
        """A second Encode beside the first."""
        if part.num_lost < MAX_ATTEMPTS and part.item not in job.landed:
            source = self._encode(job, part, pick)
            self._later(partial(self._add_source, job, replace(part), source))

    def fail(self, job: Job, outcome: str) -> None:
        """The request ends here: failed or aborted."""
        self._end(job, outcome)
        job.decoder.leave(job.request_id)

    def sweep(self) -> None:
        """Notices which requests their decoder has finished."""
        for job in self.running:
            if not any(r.request_id == job.request_id for r in job.decoder.requests):
                self._end(job, "finished")

    def _end(self, job: Job, outcome: str) -> None:
        job.outcome = outcome
        for part in job.parts:
            self._close(part)

    def _close(self, part: PartJob) -> None:
        for wire in part.encodes:
            if not wire.dead:
                wire.up.send("end")
        part.encodes.clear()

    def break_encode(self, job: Job, part: PartJob, wire: EncodeWire) -> None:
        """The stream breaks."""
        wire.down.drop()
        self._on_encode(job, part, wire, part.attempt, "broken")

    def _later(self, call: partial[None]) -> None:
        self._network.link(lambda _: call()).send(None)

    def _redirect(self, job: Job, part: PartJob, source: Source) -> None:
        job.decoder.redirect(job.request_id, part.item, part.part, part.attempt, source)

    def _add_source(self, job: Job, part: PartJob, source: Source) -> None:
        job.decoder.add_source(job.request_id, part.item, part.part, part.attempt, source)
