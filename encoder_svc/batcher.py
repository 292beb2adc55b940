"""Which unit is prepared next, and which units share a forward. Policy alone: no torch, no clock.

A job is a sequence of units. Its first unit queues on arrival, each later one when its predecessor
is prepared, so a long clip takes turns with everybody else. Higher priority goes first, then the
older ticket. A batch takes prepared units in that order until the budget is full; a unit over the
budget runs alone, and so does every unit of a clip: what else is in a forward changes the last bits
of its rows. A unit goes: waiting -> preparing -> ready -> running -> gone.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, order=True)
class Ticket:
    """One unit's place in the queue; smaller goes first."""

    urgency: int  # minus the priority
    number: int
    job: int = field(compare=False)
    unit: int = field(compare=False)
    patches: int = field(compare=False)
    alone: bool = field(compare=False, default=False)


@dataclass(slots=True)
class _Job:
    urgency: int
    units: tuple[int, ...]
    alone: bool
    finished: int = 0


class Batcher:
    """Owns the queue and the accounting of patches.

    Args:
        max_batch_patches: Budget of one forward.
        max_preparing: Units being prepared at once.
    """

    def __init__(self, *, max_batch_patches: int, max_preparing: int) -> None:
        self._budget = max_batch_patches
        self._max_preparing = max_preparing
        self._jobs: dict[int, _Job] = {}
        self._waiting: list[Ticket] = []
        self._preparing: set[Ticket] = set()
        self._ready: list[Ticket] = []
        self._running: set[Ticket] = set()
        self._tickets = 0
        self._pending_patches = 0

    @property
    def pending_patches(self) -> int:
        """Patches of jobs added and neither finished nor dropped."""
        return self._pending_patches

    def add(
        self, job: int, units: Sequence[int], *, priority: int = 0, alone: bool = False
    ) -> None:
        """Queues a job of so many patches a unit; `alone`: none shares a forward.

        Its number must be new.
        """
        assert units and job not in self._jobs
        self._jobs[job] = _Job(-priority, tuple(units), alone)
        self._pending_patches += sum(units)
        self._queue(job, 0)

    def next_to_prepare(self) -> Ticket | None:
        """The unit to prepare now; None when there is none or enough is prepared ahead.

        Prepared patches take memory: no more than two batches of them are made ahead of the tower.
        """
        if not self._waiting or len(self._preparing) >= self._max_preparing:
            return None
        ahead = sum(t.patches for t in self._preparing) + sum(t.patches for t in self._ready)
        if ahead and ahead + self._waiting[0].patches > 2 * self._budget:
            return None
        ticket = heapq.heappop(self._waiting)
        self._preparing.add(ticket)
        return ticket

    def prepared(self, ticket: Ticket) -> bool:
        """The unit's patches are there. False: its job was dropped, throw them away."""
        self._preparing.discard(ticket)
        job = self._jobs.get(ticket.job)
        if job is None:
            return False
        heapq.heappush(self._ready, ticket)
        if ticket.unit + 1 < len(job.units):
            self._queue(ticket.job, ticket.unit + 1)
        return True

    def take_batch(self) -> tuple[Ticket, ...]:
        """Units for one forward; empty when none is ready. In order, none overtakes."""
        batch: list[Ticket] = []
        total = 0
        while self._ready:
            ticket = self._ready[0]
            full = total + ticket.patches > self._budget
            if batch and (full or ticket.alone or batch[0].alone):
                break
            total += ticket.patches
            batch.append(heapq.heappop(self._ready))
        self._running.update(batch)
        return tuple(batch)

    def batch_is_full(self) -> bool:
        """Whether a ready unit does not fit into the next batch: waiting would not fill it more."""
        total = 0
        for index, ticket in enumerate(sorted(self._ready)):
            total += ticket.patches
            if index and (total > self._budget or ticket.alone):
                return True
            if ticket.alone:
                return True
        return total >= self._budget

    def ran(self, ticket: Ticket) -> bool:
        """The unit's forward is over. False: its job was dropped meanwhile."""
        self._running.discard(ticket)
        job = self._jobs.get(ticket.job)
        if job is None:
            return False
        job.finished += 1
        self._pending_patches -= ticket.patches
        if job.finished == len(job.units):
            del self._jobs[ticket.job]
        return True

    def drop(self, job: int) -> None:
        """Forgets a job, cancelled or failed. What is in preparation or in a forward is void."""
        state = self._jobs.pop(job, None)
        if state is None:
            return
        self._pending_patches -= sum(state.units[state.finished :])
        self._waiting = [t for t in self._waiting if t.job != job]
        self._ready = [t for t in self._ready if t.job != job]
        heapq.heapify(self._waiting)
        heapq.heapify(self._ready)

    def check(self) -> None:
        """Asserts the accounting: a live job has one ticket to prepare, or all are prepared."""
        pending = 0
        for number, job in self._jobs.items():
            pending += sum(job.units[job.finished :])
            tickets = (*self._waiting, *self._preparing, *self._ready, *self._running)
            units = sorted(t.unit for t in tickets if t.job == number)
            assert units == list(range(job.finished, job.finished + len(units))) and units
        assert pending == self._pending_patches
        assert all(t.job in self._jobs for t in (*self._waiting, *self._ready))
        assert len(self._preparing) <= self._max_preparing

    def _queue(self, job: int, unit: int) -> None:
        state = self._jobs[job]
        self._tickets += 1
        patches = state.units[unit]
        ticket = Ticket(state.urgency, self._tickets, job, unit, patches, state.alone)
        heapq.heappush(self._waiting, ticket)
