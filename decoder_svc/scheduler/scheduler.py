"""Decides what the next step computes. Decoding goes first, then prompts in chunks, then admission.

Never starves: whoever is first gets pages by preempting from the back (pages are dropped, tokens
kept and computed again later), nobody overtakes the head of the waiting line, and priority counts
only so much. A chunk ends before the first row of a medium that has not landed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, islice

import numpy as np

from chiasm.telemetry import DecoderMetrics
from decoder_svc.embeddings.events import Demand
from decoder_svc.embeddings.receiver import EmbeddingReceiver
from decoder_svc.engine.counts import Ints
from decoder_svc.engine.messages import EngineLoad, StepPlan
from decoder_svc.engine.request import Request, Sequence, State
from decoder_svc.kv_cache.block_pool import BlockPool
from decoder_svc.kv_cache.prefix import PrefixIndex
from decoder_svc.scheduler.budget import Limits, StepBudget, demands_of, landed_chunk
from decoder_svc.scheduler.decoding import ready_to_decode
from decoder_svc.scheduler.gate import PromptGate
from decoder_svc.scheduler.media_rows import MediaRows
from decoder_svc.scheduler.pages import PageTable
from decoder_svc.scheduler.planning import Chosen, Flight, plan_step
from decoder_svc.scheduler.policy import Queue
from decoder_svc.scheduler.seats import Seats


class Scheduler:
    """Owns the two queues and, through the page table, every page.

    Args:
        limits: Budgets of a step.
        pool: Pages.
        receiver: Where rows of media land; the scheduler tells it what it has used.
        prefix: Finds shared beginnings; None = off.
        metrics: Counters of preemptions and prefix hits.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        pool: BlockPool,
        receiver: EmbeddingReceiver,
        prefix: PrefixIndex | None,
        metrics: DecoderMetrics,
    ) -> None:
        self._limits = limits
        self._seats = Seats(limits.max_running)
        self._pages = PageTable(pool, prefix, limits, self._seats)
        self._receiver = receiver
        self._rows = MediaRows(receiver)
        self._metrics = metrics
        self._waiting = Queue()
        self._running = Queue()
        self._starved: Sequence | None = None  # found no page in the last step
        self._gate = PromptGate(limits)
        self._steps: dict[int, Flight] = {}  # submitted
        self._num_steps = 0

    def add(self, request: Request) -> None:
        """Takes a request in. Its first choice prefills the prompt, the others wait to share it."""
        self._promote(request)

    def finish(self, sequence: Sequence) -> None:
        """Ends a choice; its pages are free once no step in flight uses them."""
        if sequence.state in (State.WAITING, State.RUNNING):
            self._queue_of(sequence).remove(sequence)
        sequence.finish()
        if not sequence.in_flight:
            self._leave(sequence)
        request = sequence.request
        self._promote(request)
        if any(s.state is State.WAITING for s in request.sequences):
            self._rows.give_back(request)

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can run."""
        had_pages = self._starved is None
        decodes, self._starved = self._choose_decodes(apart=self._limits.depth)
        chosen = Chosen(decodes, [])
        prefilling, num_decodes = [], len(self._running)
        if len(decodes) < len(self._running):
            counts, at = self._seats.counts, self._running.seats
            at = at[~counts.decodes(at)]
            num_decodes -= len(at)
            # Of those whose next row was missing, nothing has come since.
            stalled = counts.stalled_at[at] == self._receiver.revision
            prefilling = self._seats.holders(at[~stalled])
        num_decodes = self._limits.share(num_decodes)
        seats = self._seats.num_free
        if self._gate.opens(
            chain(prefilling, islice(self._waiting, seats)),
            num_decodes=num_decodes if chosen else 0,
            is_scarce=had_pages and len(self._waiting) > seats,
        ):
            self._choose_prompts(prefilling, num_decodes, chosen, now)
        if not chosen and self._limits.ahead:  # fewer sequences than stages: they follow themselves
            chosen.decodes, starved = self._choose_decodes(apart=1)
            self._starved = starved or self._starved
        if not chosen:
            return None
        self._num_steps += 1
        plan, self._steps[self._num_steps] = plan_step(
            self._num_steps,
            chosen,
            self._receiver,
            self._seats,
            most_rows=self._limits.most_rows,
        )
        return plan

    def members(self, step: int) -> set[str]:
        """Requests that a failure of a step in flight fails."""
        flight = self._steps.get(step)
        return {s.request.request_id for s in flight.sequences} if flight else set()

    def complete(self, step: int) -> Flight:
        """A step came back: what it computed counts. Returns who was in it; see `share`."""
        return self._settle(self._steps.pop(step), counts=True)

    def share(self, flight: Flight) -> None:
        """Others may use what a complete step has computed, of whoever has not ended since."""
        if flight.cohort is not None:
            self._pages.publish_each(flight.cohort.at)
        for entry in flight.entries:
            sequence, request = entry.sequence, entry.sequence.request
            if sequence.state is State.RUNNING:
                if sequence.computed % self._limits.block_size < entry.length:
                    self._pages.publish(sequence)
                if len(request.sequences) > 1:
                    self._fork(sequence)
        prefilled = {
            id(entry.sequence.request): entry.sequence.request
            for entry in flight.entries
            if entry.sequence.request.promises
            and entry.sequence.computed - entry.length < entry.sequence.request.num_prompt
        }
        for request in prefilled.values():
            self._rows.consume(request)

    def condemn(self, request: Request) -> None:
        """What is on its pages is not sound: nobody finds any of them again."""
        for sequence in request.sequences:
            self._pages.condemn(sequence)

    def discard(self) -> set[str]:
        """No planned step comes back, submitted or not. Returns the requests that were in any."""
        concerned: set[str] = set()
        for step in tuple(self._steps):
            concerned |= self.members(step)
            self._settle(self._steps.pop(step), counts=False)
        return concerned

    def restart(self) -> None:
        """What pages held is lost: no step in flight comes back, everybody computes again."""
        self.discard()
        for sequence in reversed(tuple(self._running)):
            self._preempt(sequence)
        self._pages.forget()

    def demands(self) -> list[Demand]:
        """Rows that running sequences want soon, the first to be served first.

        A sequence that wants rows only later is listed too, with an empty span, to keep its place.
        One that is not in the batch is not listed: its rows would hold pages it cannot free.
        """
        ahead = self._limits.chunk_tokens * self._limits.lookahead_chunks
        counts, at = self._seats.counts, self._running.seats
        reading = at[counts.scheduled[at] - counts.in_flight[at] < counts.prompt[at]]
        found: list[Demand] = []
        for sequence in self._seats.holders(reading):
            if sequence.request.promises:
                found += demands_of(sequence, ahead)
        return found

    def load(self) -> EngineLoad:
        """What there is to do."""
        left = self._seats.counts.num_left(self._running.seats)
        return EngineLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            waiting_tokens=self._waiting.num_tokens + int(left[left > 1].sum()),
            kv_usage_ratio=self._pages.usage,
        )

    def check(self) -> None:
        """Raises AssertionError when pages leaked or a queue holds what it should not."""
        flying = chain.from_iterable(flight.sequences for flight in self._steps.values())
        finishing = [sequence for sequence in flying if sequence.state is State.FINISHED]
        holders = list({id(s): s for s in (*self._running, *finishing)}.values())
        self._pages.check(holders)
        self._seats.check(holders)
        assert all(s.state is State.RUNNING for s in self._running)
        assert all(s.state is State.WAITING and not s.blocks for s in self._waiting)

    # Choosing.

    def _choose_prompts(
        self,
        prefilling: list[Sequence],
        num_decodes: int,
        chosen: Chosen,
        now: float,
    ) -> None:
        """Adds chunks of prompts, of those in the batch first, then of who is admitted."""
        share = self._limits.share(len(prefilling) + len(self._waiting))
        budget = StepBudget(self._limits.prompt_tokens(num_decodes), share)
        self._choose_chunks(prefilling, budget, chosen, now)
        while budget.sequences and (admitted := self._admit(now)) is not None:
            self._choose_chunks((admitted,), budget, chosen, now)

    def _choose_decodes(self, *, apart: int) -> tuple[Ints, Sequence | None]:
        """The seats of sequences that decode in the next step, and the first that found no page.

        Args:
            apart: Steps from one that draws a token to the one that computes it, as long as the
                token is not known here.
        """
        counts, latest = self._seats.counts, self._num_steps + 1 - apart
        ready, most = ready_to_decode(
            self._running, counts, self._limits, latest=latest, starved=self._starved
        )
        starved = None
        if self._pages.grow_each(ready[:most]):
            ready = ready[:most]
        else:
            ready, starved = self._grow_in_turn(self._seats.holders(ready), most)
        counts.last_step[ready] = self._num_steps + 1
        return ready, starved

    def _grow_in_turn(self, ready: list[Sequence], most: int) -> tuple[Ints, Sequence | None]:
        """At most so many of these, once they have pages, at the cost of later ones; and the first
        that found none."""
        chosen: list[Sequence] = []
        starved = None
        for sequence in ready:
            if len(chosen) == most:
                break
            if sequence.state is not State.RUNNING:
                continue
            if not self._make_room(sequence, 1):
                starved = sequence
                break
            sequence.choose(self._num_steps + 1)
            chosen.append(sequence)
        return np.array([s.seat for s in chosen], dtype=np.int64), starved

    def _choose_chunks(
        self,
        sequences: Iterable[Sequence],
        budget: StepBudget,
        chosen: Chosen,
        now: float,
    ) -> None:
        """Adds prefill chunks within the budget, and takes them from it."""
        for sequence in sequences:
            if sequence.state is not State.RUNNING or sequence.decodes or not sequence.num_left:
                continue
            # Asked also without a budget: who waits for the budget does not wait for rows.
            wanted = min(sequence.num_left, max(budget.tokens, 1))
            length = landed_chunk(
                sequence, wanted, self._receiver, least_text=self._limits.least_text
            )
            if length:
                sequence.request.move()
            else:
                sequence.stall(self._receiver.revision, now)
            if length == 0 or budget.tokens == 0 or budget.sequences == 0:
                continue
            if not self._make_room(sequence, length):
                length = min(length, self._pages.room(sequence))
                if length == 0:
                    self._starved = self._starved or sequence
                    continue
                self._make_room(sequence, length)
            sequence.choose(self._num_steps + 1)
            chosen.chunks.append((sequence, length))
            budget.tokens -= length
            budget.sequences -= 1

    def _make_room(self, sequence: Sequence, length: int) -> bool:
        """Gets pages for `length` more tokens, preempting from the back while there are too few."""
        while not self._pages.grow(sequence, length):
            victim = self._running.victim(sequence, step=self._num_steps + 1)
            if victim is None:
                return False
            self._preempt(victim)
        return True

    def _preempt(self, victim: Sequence) -> None:
        self._metrics.preemptions.inc()
        self._running.remove(victim)
        self._leave(victim)
        victim.state = State.WAITING
        self._waiting.add(victim)
        request = victim.request
        request.move()
        self._rows.give_back(request)

    def _admit(self, now: float) -> Sequence | None:
        """Moves the head of the waiting line into the batch when seats and pages allow."""
        sequence = self._waiting.first
        if sequence is None or not self._seats.num_free:
            return None
        if self._seats.num_left(self._running) < 1 + sequence.request.num_parked:
            return None
        found = self._pages.find(sequence)
        again = self._rows.needed_again(sequence.request, found.num_tokens)
        if again and any(s.in_flight for s in sequence.request.sequences):
            return None
        if len(self._running) and not self._pages.fits(sequence, found, self._running):
            return None
        self._waiting.remove(sequence)
        self._pages.attach(sequence, found)
        self._enter(sequence)
        self._note_admission(sequence, now)
        if again:
            self._rows.fetch_again(sequence.request, again)
        self._rows.consume(sequence.request)
        return sequence

    def _note_admission(self, sequence: Sequence, now: float) -> None:
        request = sequence.request
        if request.num_cached is None:
            request.num_cached = min(sequence.computed, len(request.prompt))
            request.clock.scheduled = now
            self._metrics.prefix_queries.inc(len(request.prompt))
            self._metrics.prefix_hits.inc(request.num_cached)

    def _enter(self, sequence: Sequence) -> None:
        self._seats.take(sequence)
        self._running.add(sequence)
        sequence.state = State.RUNNING

    def _leave(self, sequence: Sequence) -> None:
        """Gives back what a sequence holds that is neither in the batch nor in flight any more."""
        self._pages.drop(sequence)
        self._seats.free(sequence)

    # After a step.

    def _settle(self, flight: Flight, *, counts: bool) -> Flight:
        """What was in flight is not any more, and who has finished leaves."""
        for entry in flight.entries:
            entry.sequence.end(entry.length, entry.draws, counts=counts)
        back = [entry.sequence for entry in flight.entries]
        if flight.cohort is not None:
            over = flight.cohort.end(counts=counts)
            back += [flight.cohort.sequences[place] for place in over]
            flight = replace(flight, over=tuple(over))
        for sequence in back:
            if sequence.state is State.FINISHED and not sequence.in_flight:
                self._leave(sequence)
        return flight

    def _fork(self, leader: Sequence) -> None:
        """Siblings join as soon as the prompt's whole pages are computed; the tail is their own."""
        shared = self._pages.num_shareable(leader.request)
        if leader.computed < shared:
            return
        for sibling in leader.request.sequences:
            if sibling.state is State.PARKED:
                self._pages.share(leader, sibling, shared)
                self._enter(sibling)

    def _promote(self, request: Request) -> None:
        """Sees to it that one choice leads while others are parked."""
        if any(s.state in (State.WAITING, State.RUNNING) for s in request.sequences):
            return
        for sequence in request.sequences:
            if sequence.state is State.PARKED:
                sequence.state = State.WAITING
                self._waiting.add(sequence)
                return

    def _queue_of(self, sequence: Sequence) -> Queue:
        return self._running if sequence.state is State.RUNNING else self._waiting
