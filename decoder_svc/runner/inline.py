"""Runs the one rank in the engine's own thread."""

from __future__ import annotations

from collections import deque

from decoder_svc.engine.messages import StepPlan, StepResult
from decoder_svc.runner.executor import Executor
from decoder_svc.runner.model_runner import ModelRunner
from decoder_svc.runner.outcome import Outcome


class InlineExecutor(Executor):
    """Owns one runner; on the CPU a step has been computed when `submit` returns.

    Args:
        runner: The only rank's.
        depth: Steps in flight at once.
    """

    def __init__(self, runner: ModelRunner, *, depth: int = 1) -> None:
        self.depth = depth
        self.most_rows = runner.most_rows
        self._runner = runner
        self._outcomes: deque[Outcome] = deque()

    def submit(self, plan: StepPlan) -> None:
        """See the base class."""
        outcome = self._runner.run(plan)
        assert outcome is not None, "the only rank samples"
        self._outcomes.append(outcome)

    def collect(self) -> StepResult:
        """See the base class."""
        return self._outcomes.popleft().wait()

    def close(self) -> None:
        """See the base class."""
        self._runner.close()
