"""Two encoders, two decoders, a gateway and an unkind network, driven by a string of bytes."""

from __future__ import annotations

from collections.abc import Callable

from chiasm.fakes.network import Network
from chiasm.plan import Cause
from decoder_svc.embeddings.events import Notice
from tests.contract.transfer_model.decoder_host import PAGE_ROWS, PAGES, DecoderHost
from tests.contract.transfer_model.encoder_host import EncoderHost, Violation
from tests.contract.transfer_model.gateway import Gateway, Job, PartJob
from tests.contract.transfer_model.memory import ListMemory, SlabMemory

MEDIA = ((b"A", 8), (b"B", 7), (b"C", 3), (b"D", 10))  # digest, rows
MAX_REQUESTS = 8
MAX_ROUNDS = 2000


class World:
    """`run` does one thing after another; `drain` does everything, fairly, until all is quiet."""

    def __init__(
        self, memory: Callable[[str], SlabMemory] | None = None, *, refusals: bool = False
    ) -> None:
        self._memory = memory or (lambda name: ListMemory(PAGES * PAGE_ROWS))
        self.network = Network()
        self.encoders = {name: EncoderHost(name, self.network) for name in ("x", "y")}
        self.gateway = Gateway(self.encoders, self.network)
        self.decoders = [self._decoder(name) for name in ("d", "e")]
        self.restarts = 0
        self.seen: set[str] = set()
        self._rules = self._weighted() + refusals * 2 * [self._refuse_write]

    def _decoder(self, name: str) -> DecoderHost:
        def deliver(notice: Notice) -> None:
            self.gateway.on_notice(host, notice)

        notices = self.network.link(deliver)
        host = DecoderHost(name, self.encoders, notices.send, self._memory(name))
        return host

    def _weighted(self) -> list[Callable[[int], None]]:
        weights: list[tuple[Callable[[int], None], int]] = [
            (self._deliver, 18),
            (self._flow, 12),
            (self._work, 5),
            (self._write, 6),
            (self._grant, 4),
            (self._consume, 5),
            (self._start, 4),
            (self._fence, 3),
            (self._break_fetch, 5),
            (self._break_encode, 1),
            (self._restart, 1),
            (self._hedge, 2),
            (self._redirect, 3),
            (self._abort, 2),
            (self._preempt, 2),
            (self._fail_job, 1),
            (self._grace, 1),
            (self._retry, 2),
        ]
        return [rule for rule, weight in weights for _ in range(weight)]

    def run(self, script: bytes) -> None:
        """Two bytes a step: which rule, and on what. Then everything must come to an end."""
        self._start(script[0])
        self._start(script[-1])
        for at in range(0, len(script) - 1, 2):
            self._rules[script[at] % len(self._rules)](script[at + 1])
            self.gateway.sweep()
            self.check()
            self._look()
        self.drain()
        self.seen |= {job.outcome for job in self.gateway.jobs.values()}

    def _look(self) -> None:
        """Notes which of the states that matter were reached."""
        hosts, decoders = self.encoders.values(), self.decoders
        parts = [part for job in self.gateway.jobs.values() for part in job.parts]
        entries = [host.store.find(p.encode_id) for host in hosts for p in host.encodes]
        for name, reached in (
            ("recalled", any(part.num_recalls for part in parts)),
            ("refused", any(part.num_refused for part in parts)),
            ("hedged", any(len(part.encodes) > 1 for part in parts)),
            ("quarantined", any(decoder.fences for decoder in decoders)),
            ("stale attempt", any(d.receiver.counters.stale_attempts for d in decoders)),
            ("late write", any(p.wire.broken for host in hosts for p in host.posted)),
            ("switched", any(wire.streaming for d in decoders for wire in d.wires.values())),
            ("granted ahead", any(host.granted_ahead for host in hosts)),
            ("restarted", self.restarts > 0),
            ("shared", any(entry and len(entry.encodes) > 1 for entry in entries)),
        ):
            if reached:
                self.seen.add(name)

    def check(self) -> None:
        for host in self.encoders.values():
            host.check()
        for decoder in self.decoders:
            decoder.receiver.check()

    # What may happen.

    def _deliver(self, pick: int) -> None:
        if self.network.busy:
            self.network.busy[pick % len(self.network.busy)].deliver()

    def _flow(self, pick: int) -> None:
        """Much happens at once, but a third of the links and all of the memory are slower."""
        for _ in range(1 + pick % 3):
            self._round(write=False, slow=pick)

    def _work(self, pick: int) -> None:
        host = self._host(pick)
        if host.jobs:
            host.work(list(host.jobs)[pick % len(host.jobs)])

    def _fail_job(self, pick: int) -> None:
        host = self._host(pick)
        if host.jobs:
            causes = (Cause.LOST, Cause.TIMEOUT, Cause.INVALID_MEDIA)
            key = list(host.jobs)[pick % len(host.jobs)]
            host.work(key, fail=causes[pick % 3])

    def _write(self, pick: int) -> None:
        host = self._host(pick)
        if host.posted:
            host.write(host.posted[pick % len(host.posted)], cut=pick > 200)

    def _refuse_write(self, pick: int) -> None:
        host = self._host(pick)
        if host.posted:
            host.refuse(host.posted[pick % len(host.posted)])

    def _grant(self, pick: int) -> None:
        self.decoders[pick % 2].step()

    def _consume(self, pick: int) -> None:
        self.decoders[pick % 2].consume()

    def _start(self, pick: int) -> None:
        if len(self.gateway.jobs) == MAX_REQUESTS:
            return
        first, second = MEDIA[pick % 4], MEDIA[pick // 4 % 4]
        items = [(*first, 1 + pick // 16 % 2)]
        if pick // 32 % 2:
            items.append((*second, 1 + pick // 64 % 2))
        self.gateway.start(self.decoders[pick // 128], items, pick)

    def _fence(self, pick: int) -> None:
        decoder = self.decoders[pick % 2]
        if decoder.fences:
            decoder.try_fence(decoder.fences[pick % len(decoder.fences)])

    def _break_fetch(self, pick: int) -> None:
        decoder = self.decoders[pick % 2]
        if decoder.wires:
            decoder.break_fetch(list(decoder.wires.values())[pick % len(decoder.wires)])

    def _break_encode(self, pick: int) -> None:
        job, part = self._part(pick)
        if job is not None and part is not None and part.encodes:
            self.gateway.break_encode(job, part, part.encodes[pick % len(part.encodes)])

    def _restart(self, pick: int) -> None:
        if self.restarts < 2:
            self.restarts += 1
            self._host(pick).restart()

    def _hedge(self, pick: int) -> None:
        job, part = self._part(pick)
        if job is not None and part is not None:
            self.gateway.hedge(job, part, pick)

    def _redirect(self, pick: int) -> None:
        job, part = self._part(pick)
        if job is not None and part is not None and part.item not in job.landed:
            self.gateway.retry(job, part, pick)

    def _abort(self, pick: int) -> None:
        running = self.gateway.running
        if running:
            self.gateway.fail(running[pick % len(running)], "aborted")

    def _preempt(self, pick: int) -> None:
        decoder = self.decoders[pick % 2]
        if decoder.requests:
            request = decoder.requests[pick // 2 % min(3, len(decoder.requests))]
            decoder.preempt(request, pick % len(request.digests), pick // 8 % 8)

    def _grace(self, pick: int) -> None:
        self._host(pick).grace_over()

    def _retry(self, pick: int) -> None:
        if self.gateway.later:
            self.gateway.later.pop(pick % len(self.gateway.later))()

    def _host(self, pick: int) -> EncoderHost:
        return self.encoders["xy"[pick % 2]]

    def _part(self, pick: int) -> tuple[Job | None, PartJob | None]:
        running = self.gateway.running
        if not running:
            return None, None
        job = running[pick % len(running)]
        return job, job.parts[pick // 8 % len(job.parts)]

    # The end.

    def drain(self) -> None:
        """Fair and without further faults: every request must finish, or fail with a cause."""
        for number in range(MAX_ROUNDS):
            # Writes are the slowest of all: whatever reuses memory too early meets them.
            if not self._round(write=number % 4 == 3) and not self._writing():
                break
            self.check()
        else:
            raise Violation("it goes on for ever")
        waiting = [job.request_id for job in self.gateway.running]
        if waiting:
            raise Violation(f"{waiting} wait for ever")
        for decoder in self.decoders:
            if decoder.receiver.num_free_pages != PAGES or decoder.wires or decoder.fences:
                raise Violation(f"decoder {decoder.name} did not come to rest")
        for host in self.encoders.values():
            if host.store.num_encodes or host.table.num_open or host.jobs or host.posted:
                raise Violation(f"encoder {host.name} did not come to rest")
        self.check()

    def _writing(self) -> bool:
        return any(host.posted for host in self.encoders.values())

    def _round(self, *, write: bool, slow: int | None = None) -> bool:
        """Lets everybody act once; whether anybody could."""
        moved = self._deliver_all(slow)
        for host in self.encoders.values():
            for posted in tuple(host.posted) if write else ():
                host.write(posted)
                moved = True
            for key in tuple(host.jobs):
                if key in host.jobs:
                    host.work(key)
                    moved = True
        for decoder in self.decoders:
            decoder.step()
            for fence in tuple(decoder.fences):
                moved = decoder.try_fence(fence) or moved
            moved = decoder.consume() or moved
        self.gateway.sweep()
        return moved or bool(self.network.busy) or self._writing() or self._last_resort()

    def _deliver_all(self, slow: int | None) -> bool:
        moved = False
        for number, link in enumerate(tuple(self.network.busy)):
            if (slow is None or number % 3 != slow % 3) and link in self.network.busy:
                link.deliver()
                moved = True
        return moved

    def _last_resort(self) -> bool:
        """When nothing else can happen, what waits for time to pass does."""
        if self.gateway.later:
            self.gateway.later.pop(0)()
            return True
        for host in self.encoders.values():
            host.grace_over()
        return bool(self.network.busy)
