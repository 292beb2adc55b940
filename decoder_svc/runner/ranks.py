"""Runs steps on a group of ranks, each a process; a group that is lost is started again.

A state machine without a thread of its own: whoever owns the executor calls `poll`.

    starting -> ready -> lost -> (back-off) -> starting ...
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from chiasm.errors import Unavailable
from chiasm.process import BACKOFF_S, HEALTHY_AFTER_S
from decoder_svc.engine.messages import StepPlan, StepResult
from decoder_svc.runner.codec import Start
from decoder_svc.runner.executor import Executor, RanksLost
from decoder_svc.runner.group import RankGroup

logger = logging.getLogger(__name__)

_GLANCE_S = 0.05
_STEP_S = 600.0


class Launch(Protocol):
    """Starts groups of ranks."""

    def __call__(self, start: Start) -> RankGroup | None:
        """A group; None while ranks of other hosts have not come yet. Raises RanksLost."""

    def close(self) -> None:
        """Leaves nothing behind."""


class RanksExecutor(Executor):
    """Plans go to every rank, results come from the one that samples.

    Sampled ids return to the first stage by way of the engine, in the next plan: the scheduler has
    to see them in any case, and one message per rank and step is all that is sent.

    Args:
        launch: Starts a group of ranks.
        depth: Pipeline stages.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, launch: Launch, *, depth: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.depth = depth
        self.num_blocks = 0
        self._launch = launch
        self._clock = clock
        self._group: RankGroup | None = None
        self._ready_since: float | None = None
        self._submitted: deque[float] = deque()  # when, of the steps in flight
        self._retry_at = clock()
        self._failures = 0

    def start(self) -> int:
        """Starts the ranks for the first time and waits until they have loaded.

        Returns:
            Pages of K and V that each rank has.

        Raises:
            ValueError: Settings or a checkpoint that a rank cannot serve.
            Unavailable: A rank died.
        """
        while not self.ready:
            if self._group is None:
                self._begin()
            if self._group is None:
                time.sleep(_GLANCE_S)
                continue
            try:
                self._group.listen(_GLANCE_S)
            except RanksLost as loss:
                fault = self._group.faulty_settings
                if fault:
                    raise ValueError(fault) from None
                raise Unavailable(f"the ranks did not start: {loss}") from None
            self._note_ready()
        return self.num_blocks

    @property
    def ready(self) -> bool:
        """Whether every rank has loaded and none is known to be lost."""
        return self._ready_since is not None

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of this machine's ranks; none while there is no group."""
        return self._group.pids if self._group is not None else ()

    def poll(self) -> None:
        """See the base class."""
        if self._group is None:
            self._begin()
            return
        try:
            self._group.listen(0)
        except RanksLost as loss:
            self._lose(loss)
        self._note_ready()

    def submit(self, plan: StepPlan) -> None:
        """See the base class."""
        assert self._group is not None, "submitted while there are no ranks"
        self._submitted.append(self._clock())
        try:
            self._group.send(plan)
        except RanksLost as loss:
            self._lose(loss)

    def collect(self) -> StepResult | None:
        """See the base class."""
        group = self._group
        assert group is not None and self._submitted, "no step is in flight"
        try:
            if not group.results:
                group.listen(_GLANCE_S)
            if not group.results and self._clock() - self._submitted[0] > _STEP_S:
                raise RanksLost(f"a step has not come back in {_STEP_S:g} s")
        except RanksLost as loss:
            self._lose(loss)
        if not group.results:
            return None
        self._submitted.popleft()
        return group.results.popleft()

    def close(self) -> None:
        """See the base class."""
        self._end_group()
        self._launch.close()

    def _end_group(self) -> None:
        if self._group is not None:
            self._group.end()
        self._group = self._ready_since = None

    def _note_ready(self) -> None:
        if self._ready_since is None and self._group is not None and self._group.ready:
            self._ready_since = self._clock()
            self.num_blocks, self.most_rows = self._group.num_blocks, self._group.most_rows
            logger.info("all ranks are ready, %d pages of K and V each", self.num_blocks)

    def _begin(self) -> None:
        if self._clock() < self._retry_at:
            return
        try:
            self._group = self._launch(Start(secrets.token_hex(8), self.num_blocks))
        except RanksLost as loss:
            self._back_off(str(loss))
        except OSError as error:  # no more processes, memory or files, for now
            self._back_off(f"ranks cannot be started: {error.strerror}")

    def _lose(self, loss: RanksLost) -> None:
        """Ends what is left of the group. Raises when it was in use; starting again is quiet."""
        was_ready, since = self.ready, self._ready_since
        if since is not None and self._clock() - since > HEALTHY_AFTER_S:
            self._failures = 0
        self._end_group()
        self._submitted.clear()
        self._back_off(str(loss))
        if was_ready:
            self.num_losses += 1
            raise loss

    def _back_off(self, reason: str) -> None:
        delay = BACKOFF_S[min(self._failures, len(BACKOFF_S) - 1)]
        self._failures += 1
        self._retry_at = self._clock() + delay
        logger.error("%s; all ranks are started again in %g s", reason, delay)
