"""Runs the one rank in the engine's own thread."""

from __future__ import annotations

from collections import deque

from decoder_svc.engine.messages import StepPlan, StepResult
from decoder_svc.runner.executor import Executor
from decoder_svc.runner.model_runner import ModelRunner


class InlineExecutor(Executor):
    """Owns one runner; a submitted step has been computed when `submit` returns."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._results: deque[StepResult] = deque()

    def submit(self, plan: StepPlan) -> None:
        """See the base class."""
        result = self._runner.run(plan)
        assert result is not None, "the only rank samples"
        self._results.append(result)

    def collect(self) -> StepResult:
        """See the base class."""
        return self._results.popleft()

    def close(self) -> None:
        """See the base class."""
        self._runner.close()
