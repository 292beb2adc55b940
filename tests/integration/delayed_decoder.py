"""The real decoder, slowed on command: `python -m tests.integration.delayed_decoder`.

Before each step it sleeps as long as `delays` says, for each token of the step, and it prints a
line once its result is there: `computed <tokens>`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path

from chiasm.cli.service import run_service
from chiasm.config import DecoderConfig
from decoder_svc import app
from decoder_svc.assembly import Parts, load_parts
from decoder_svc.config.from_hf import TextConfig
from decoder_svc.engine.messages import StepPlan, StepResult
from decoder_svc.runner.executor import Executor
from tests.integration import delays


class DelayedExecutor(Executor):
    """Takes its time, and no core."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.depth = executor.depth
        self._submitted: deque[int] = deque()  # tokens of each step in flight
        self._losses = 0

    @property
    def ready(self) -> bool:
        """See the base class."""
        return self._executor.ready

    @property
    def num_losses(self) -> int:  # type: ignore[override]
        """See the base class."""
        return self._executor.num_losses

    def poll(self) -> None:
        """See the base class."""
        self._executor.poll()

    def submit(self, plan: StepPlan) -> None:
        """See the base class."""
        num_tokens = sum(len(s.token_ids) for s in plan.sequences)
        delays.wait(lambda file: file.get("token", 0.0) * num_tokens)
        if self._losses != self.num_losses:  # none of these comes back
            self._losses = self.num_losses
            self._submitted.clear()
        self._submitted.append(num_tokens)
        self._executor.submit(plan)

    def collect(self) -> StepResult | None:
        """See the base class."""
        result = self._executor.collect()
        if result is not None:
            print(f"computed {self._submitted.popleft()}", flush=True)
        return result

    def close(self) -> None:
        """See the base class."""
        self._executor.close()


def main(config: DecoderConfig) -> None:
    app.main(config, load)


def load(config: DecoderConfig, text: TextConfig, model_dir: Path) -> Parts:
    parts = load_parts(config, text, model_dir)
    return replace(parts, executor=DelayedExecutor(parts.executor))


if __name__ == "__main__":
    run_service(DecoderConfig, "tests.integration.delayed_decoder:main")
