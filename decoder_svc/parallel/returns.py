"""Drawn tokens on their way from the last stage back to the first, without passing the engine.

Both ends know from the step plans how many come when: no header travels. They have a group of their
own, so that they never wait behind hidden states that go the other way.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from decoder_svc.engine.messages import StepPlan
from decoder_svc.parallel.mesh import ParallelMesh
from decoder_svc.runner.rows import drawing_seats, pending_seats
from decoder_svc.runner.seats import SeatTable

_MOST_DUE = 8


@dataclass(frozen=True, slots=True)
class _Due:
    step: int
    work: dist.Work
    seats: torch.Tensor
    tokens: torch.Tensor


class TokenReturn:
    """One rank's end of the way back; ranks of stages between have none.

    Args:
        mesh: Where the rank is.
        group: Of all ranks, used for nothing else.
        seats: Where the first stage keeps what came.
    """

    def __init__(self, mesh: ParallelMesh, group: Any, seats: SeatTable) -> None:
        self._group = group
        self._seats = seats
        self._first = mesh.tp_rank
        self._last = (mesh.pp_size - 1) * mesh.tp_size + mesh.tp_rank
        self._drew_in = np.zeros(seats.spare_seat, dtype=np.int64)
        self._due: deque[_Due] = deque()
        self._unsent: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def send(self, tokens: torch.Tensor) -> None:
        """Last stage: [S] int64, what a step drew."""
        while len(self._unsent) >= _MOST_DUE:
            self._unsent.popleft()[0].wait()
        tokens = tokens.clone()  # the memory of a graph is written again before this has gone
        work = dist.isend(tokens, dst=self._first, group=self._group)
        assert work is not None, "this rank is part of the group"
        self._unsent.append((work, tokens))

    def expect(self, plan: StepPlan, seats: torch.Tensor) -> None:
        """First stage: the step has been started, and these seats [S] will have drawn in it."""
        if not len(seats):
            return
        tokens = torch.empty(len(seats), dtype=torch.int64, device=seats.device)
        work = dist.irecv(tokens, src=self._last, group=self._group)
        assert work is not None, "this rank is part of the group"
        self._due.append(_Due(plan.step, work, seats, tokens))
        self._drew_in[drawing_seats(plan)] = plan.step

    def take_in(self, plan: StepPlan) -> None:
        """First stage: sees to the tokens that a step is about to use."""
        needed = self._drew_in[pending_seats(plan)]
        latest = needed.max() if len(needed) else -1
        while self._due and (self._due[0].step <= latest or len(self._due) > _MOST_DUE):
            due = self._due.popleft()
            due.work.wait()
            self._seats.note(due.seats, due.tokens)
