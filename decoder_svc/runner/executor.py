"""How step plans reach ranks and results come back. One implementation per way of running ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod

from decoder_svc.engine.messages import StepPlan, StepResult


class Executor(ABC):
    """Plans go in and results come out in the same order.

    When a method raises, no plan is in flight any more: their results will never be collected.
    """

    depth: int = 1
    """Plans that may be in flight at once: the number of pipeline stages."""

    @abstractmethod
    def submit(self, plan: StepPlan) -> None:
        """Starts a step; may raise what the step raised."""

    @abstractmethod
    def collect(self) -> StepResult:
        """Waits for the oldest step in flight; raises what it raised."""

    @abstractmethod
    def close(self) -> None:
        """Ends the ranks."""
