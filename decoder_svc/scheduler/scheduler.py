"""Decides what the next step computes. Decoding goes first, then prompts in chunks, then admission.

Never starves: whoever is first gets pages by preempting from the back (pages are dropped, tokens
kept and computed again later), nobody overtakes the head of the waiting line, and priority counts
only so much. A chunk ends before the first row of a medium that has not landed.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice

from chiasm.plan import Span
from chiasm.telemetry import DecoderMetrics
from decoder_svc.embeddings.events import Demand
from decoder_svc.embeddings.receiver import EmbeddingReceiver
from decoder_svc.engine.messages import EngineLoad, StepPlan
from decoder_svc.engine.request import Request, Sequence, State
from decoder_svc.kv_cache.block_pool import BlockPool
from decoder_svc.kv_cache.prefix import PrefixIndex
from decoder_svc.scheduler.budget import Limits, StepBudget, item_rows, landed_chunk
from decoder_svc.scheduler.gate import PromptGate
from decoder_svc.scheduler.pages import PageTable
from decoder_svc.scheduler.planning import Entry, plan_step
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
        self._pages = PageTable(pool, prefix, limits)
        self._receiver = receiver
        self._metrics = metrics
        self._waiting = Queue()
        self._running = Queue()
        self._starved: Sequence | None = None  # found no page in the last step
        self._seats = Seats(limits.max_running)
        self._gate = PromptGate(limits)
        self._steps: dict[int, list[Entry]] = {}  # submitted
        self._num_steps = 0

    def add(self, request: Request) -> None:
        """Takes a request in. Its first choice prefills the prompt, the others wait to share it."""
        self._promote(request)

    def finish(self, sequence: Sequence) -> None:
        """Ends a choice; its pages are free once no step in flight uses them."""
        if sequence.state in (State.WAITING, State.RUNNING):
            self._queue_of(sequence).remove(sequence)
        sequence.state = State.FINISHED
        if not sequence.in_flight:
            self._leave(sequence)
        self._promote(sequence.request)

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None when nothing can run."""
        chosen: list[tuple[Sequence, int]] = []
        had_pages = self._starved is None
        self._starved = self._choose_decodes(chosen, apart=self._limits.depth)
        running = tuple(self._running)
        prefilling = []
        if len(chosen) < len(running):
            prefilling = [sequence for sequence in running if not sequence.decodes]
        num_decodes = self._limits.share(len(running) - len(prefilling))
        seats = self._seats.num_free
        if self._gate.opens(
            chain(prefilling, islice(self._waiting, seats)),
            num_decodes=num_decodes if chosen else 0,
            is_scarce=had_pages and len(self._waiting) > seats,
        ):
            self._choose_prompts(prefilling, num_decodes, chosen, now)
        if not chosen and self._limits.ahead:  # fewer sequences than stages: they follow themselves
            self._starved = self._choose_decodes(chosen, apart=1) or self._starved
        if not chosen:
            return None
        self._num_steps += 1
        plan, self._steps[self._num_steps] = plan_step(
            self._num_steps, chosen, self._receiver, most_rows=self._limits.most_rows
        )
        return plan

    def members(self, step: int) -> set[str]:
        """Requests that a failure of a step in flight fails."""
        return {entry.sequence.request.request_id for entry in self._steps.get(step, ())}

    def complete(self, step: int) -> list[Sequence]:
        """A step came back: what it computed counts. Returns who drew a token, in plan order."""
        entries = self._steps.pop(step)
        prefilled: dict[int, Request] = {}
        for entry in entries:
            sequence, request = entry.sequence, entry.sequence.request
            if sequence.computed < request.num_prompt and request.promises:
                prefilled[id(request)] = request
            self._settle(entry, counts=True)
            if sequence.state is State.RUNNING:
                if sequence.computed % self._limits.block_size < entry.length:
                    self._pages.publish(sequence)
                if len(request.sequences) > 1:
                    self._fork(sequence)
        for request in prefilled.values():
            self._consume(request)
        return [entry.sequence for entry in entries if entry.draws]

    def discard(self, step: int) -> None:
        """A step failed: what it computed does not count."""
        for entry in self._steps.pop(step, ()):
            self._settle(entry, counts=False)

    def restart(self) -> None:
        """What pages held is lost: no step in flight comes back, everybody computes again."""
        for step in tuple(self._steps):
            self.discard(step)
        for sequence in reversed(tuple(self._running)):
            self._preempt(sequence)
        self._pages.forget()

    def demands(self) -> list[Demand]:
        """Rows that running sequences want soon, the first to be served first.

        A sequence that wants rows only later is listed too, with an empty span, to keep its place.
        One that is not in the batch is not listed: its rows would hold pages it cannot free.
        """
        ahead = self._limits.chunk_tokens * self._limits.lookahead_chunks
        found = []
        for sequence in self._running:
            request = sequence.request
            if request.promises and sequence.computed < len(request.prompt):
                soon = item_rows(sequence, ahead) or [(next(iter(request.promises)), Span(0, 0))]
                found += [Demand(request.request_id, item, rows) for item, rows in soon]
        return found

    def load(self) -> EngineLoad:
        """What there is to do."""
        prompt_tokens = sum(s.num_left for s in self._waiting)
        return EngineLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            waiting_tokens=prompt_tokens + sum(s.num_left for s in self._running if s.num_left > 1),
            kv_usage_ratio=self._pages.usage,
        )

    def check(self) -> None:
        """Raises AssertionError when pages leaked or a queue holds what it should not."""
        finishing = [
            entry.sequence
            for step in self._steps.values()
            for entry in step
            if entry.sequence.state is State.FINISHED
        ]
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
        chosen: list[tuple[Sequence, int]],
        now: float,
    ) -> None:
        """Adds chunks of prompts, of those in the batch first, then of who is admitted."""
        share = self._limits.share(len(prefilling) + len(self._waiting))
        budget = StepBudget(self._limits.prompt_tokens(num_decodes), share)
        self._choose_chunks(prefilling, budget, chosen, now)
        while budget.sequences and (admitted := self._admit(now)) is not None:
            self._choose_chunks((admitted,), budget, chosen, now)

    def _choose_decodes(self, chosen: list[tuple[Sequence, int]], *, apart: int) -> Sequence | None:
        """Adds sequences that decode. Returns the first that found no page.

        Args:
            chosen: Where to add.
            apart: Steps from one that draws a token to the one that computes it, as long as the
                token is not known here.
        """
        running = tuple(self._running)
        most = len(running)
        if self._limits.depth > 1:
            most = self._limits.share(sum(s.in_flight > 0 or s.decodes for s in running))
        latest = self._num_steps + 1 - apart
        for sequence in running:
            if len(chosen) == most:
                return None
            if self._starved is not None and sequence.order > self._starved.order:
                return None  # whom the starved one could have preempted must not be in flight
            if sequence.state is not State.RUNNING or not sequence.decodes:
                continue
            if sequence.num_drawing and not self._may_follow(sequence, latest):
                continue
            if not self._pages.has_room(sequence) and not self._make_room(sequence, 1):
                return sequence
            self._choose(sequence, 1, chosen)
        return None

    def _may_follow(self, sequence: Sequence, latest: int) -> bool:
        """Whether a token that is still being drawn may be computed: never two of a sequence."""
        return (
            self._limits.ahead
            and sequence.num_drawing == 1
            and sequence.last_step <= latest
            and not sequence.is_exhausted
            and not sequence.request.needs_host_state
        )

    def _choose_chunks(
        self,
        sequences: Iterable[Sequence],
        budget: StepBudget,
        chosen: list[tuple[Sequence, int]],
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
            clock = sequence.request.clock
            if length == 0 and clock.stalled_since is None:
                clock.stalled_since = now
            elif length:
                clock.stalled_since = None
            if length == 0 or budget.tokens == 0 or budget.sequences == 0:
                continue
            if not self._make_room(sequence, length):
                length = min(length, self._pages.room(sequence))
                if length == 0:
                    self._starved = self._starved or sequence
                    continue
                self._make_room(sequence, length)
            self._choose(sequence, length, chosen)
            budget.tokens -= length
            budget.sequences -= 1

    def _choose(self, sequence: Sequence, length: int, chosen: list[tuple[Sequence, int]]) -> None:
        sequence.last_step = self._num_steps + 1
        chosen.append((sequence, length))

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
        request.clock.stalled_since = None
        if any(s.state is State.RUNNING for s in request.sequences):
            return
        unused = {i: at for i, at in request.consumed.items() if at < _rows(request, i)}
        if unused:  # landed rows give their slots back too
            self._receiver.preempt(request.request_id, unused)

    def _admit(self, now: float) -> Sequence | None:
        """Moves the head of the waiting line into the batch when seats and pages allow."""
        sequence = self._waiting.first
        if sequence is None or self._seats_left() < 1 + _num_parked(sequence.request):
            return None
        found = self._pages.find(sequence)
        again = self._rows_needed_again(sequence.request, found.num_tokens)
        if again and any(s.in_flight for s in sequence.request.sequences):
            return None
        if len(self._running) and not self._pages.fits(sequence, found, self._running):
            return None
        self._waiting.remove(sequence)
        self._pages.attach(sequence, found)
        self._enter(sequence)
        self._note_admission(sequence, now)
        if again:
            sequence.request.consumed.update(again)
            self._receiver.preempt(sequence.request.request_id, again)
        self._consume(sequence.request)
        return sequence

    def _note_admission(self, sequence: Sequence, now: float) -> None:
        request = sequence.request
        if request.num_cached is None:
            request.num_cached = min(sequence.computed, len(request.prompt))
            request.clock.scheduled = now
            self._metrics.prefix_queries.inc(len(request.prompt))
            self._metrics.prefix_hits.inc(request.num_cached)

    def _seats_left(self) -> int:
        parked = {id(s.request): _num_parked(s.request) for s in self._running}
        return self._seats.num_free - sum(parked.values())

    def _enter(self, sequence: Sequence) -> None:
        self._seats.take(sequence)
        self._running.add(sequence)
        sequence.state = State.RUNNING

    def _leave(self, sequence: Sequence) -> None:
        """Gives back what a sequence holds that is neither in the batch nor in flight any more."""
        self._pages.drop(sequence)
        self._seats.free(sequence)

    # After a step.

    def _settle(self, entry: Entry, *, counts: bool) -> None:
        sequence = entry.sequence
        sequence.end(entry.length, entry.draws, counts=counts)
        if sequence.state is State.FINISHED and not sequence.in_flight:
            self._leave(sequence)

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

    def _consume(self, request: Request) -> None:
        """Tells the receiver which rows nobody will read any more."""
        edges = [s.computed for s in request.sequences if s.state is State.RUNNING]
        if not edges:
            return
        # Parked siblings need no more than their leader: they join before it leaves what is shared.
        for item, before in request.consumed.items():
            until = request.promises[item].row_at(min(edges))
            if until > before:
                request.consumed[item] = until
                self._receiver.consume(request.request_id, item, until)

    def _rows_needed_again(self, request: Request, computed: int) -> dict[int, int]:
        """Items of which rows were used and given up, but pages that held the result are gone."""
        first = {item: request.promises[item].row_at(computed) for item in request.consumed}
        return {item: row for item, row in first.items() if row < request.consumed[item]}

    def _queue_of(self, sequence: Sequence) -> Queue:
        return self._running if sequence.state is State.RUNNING else self._waiting


def _rows(request: Request, item: int) -> int:
    return request.promises[item].plan.num_rows


def _num_parked(request: Request) -> int:
    return sum(s.state is State.PARKED for s in request.sequences)
