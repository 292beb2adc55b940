"""The steps that have been submitted and are not back yet. They come back in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from chiasm.telemetry import DecoderMetrics
from decoder_svc.engine.messages import StepPlan, StepResult
from decoder_svc.runner.executor import Executor


class Pipeline:
    """Between the engine and the executor: knows what is in flight, and since when.

    Args:
        executor: Computes steps.
        metrics: Hears how long each took.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, executor: Executor, metrics: DecoderMetrics, clock: Callable[[], float]
    ) -> None:
        self._executor = executor
        self._metrics = metrics
        self._clock = clock
        self._steps: deque[tuple[int, float]] = deque()  # and when it was submitted

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_full(self) -> bool:
        """Whether no step can be added to those in flight."""
        return len(self._steps) >= self._executor.depth

    @property
    def oldest(self) -> int:
        """The step that comes back next; there is one."""
        return self._steps[0][0]

    def submit(self, plan: StepPlan) -> None:
        """Starts a step. Raises what the executor raises; the step is in flight all the same."""
        self._steps.append((plan.step, self._clock()))
        self._executor.submit(plan)

    def collect(self) -> StepResult | None:
        """The oldest step's result, or None when it is not there yet. Raises what it raised."""
        result = self._executor.collect()
        step, submitted_at = self._steps[0]
        if result is None or result.step != step:  # not yet, or of a step given up
            return None
        self._steps.popleft()
        self._metrics.step_time.observe(self._clock() - submitted_at)
        return result

    def abandon(self) -> list[int]:
        """Nothing is in flight any more: what still comes back is of a step given up."""
        steps = [step for step, _ in self._steps]
        self._steps.clear()
        return steps
