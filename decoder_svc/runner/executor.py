"""How step plans reach ranks and results come back. One implementation per way of running ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod

from decoder_svc.engine.messages import StepPlan, StepResult


class RanksLost(Exception):
    """A rank died, raised or fell silent: no step in flight comes back, all pages are lost."""


class Executor(ABC):
    """Plans go in and results come out in the same order."""

    depth: int = 1
    """Plans that may be in flight at once: one per pipeline stage, and one ahead of a GPU."""
    most_rows: int = 0
    """Sequences of a decode step that may be told in columns; 0 = none are understood."""
    num_losses: int = 0
    """How often ranks in use were lost, and all pages with them."""

    @property
    def ready(self) -> bool:
        """Whether steps can be submitted; lost ranks are started again meanwhile."""
        return True

    def poll(self) -> None:  # noqa: B027, one rank in this process needs none
        """Looks after the ranks without waiting. Raises RanksLost, once per loss."""

    @abstractmethod
    def submit(self, plan: StepPlan) -> None:
        """Starts a step; may raise what the step raised."""

    @abstractmethod
    def collect(self) -> StepResult | None:
        """Waits for the oldest step in flight; raises what it raised, or RanksLost.

        Returns:
            None when it is still being computed after a while: the engine may look around.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the ranks."""
