"""The real decoder, slowed on command: `python -m tests.integration.delayed_decoder`.

Before each step it sleeps as long as `delays` says, for each token of the step.
"""

from __future__ import annotations

import time
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

    def submit(self, plan: StepPlan) -> None:
        """See the base class."""
        time.sleep(delays.read().get("token", 0.0) * sum(len(s.token_ids) for s in plan.sequences))
        self._executor.submit(plan)

    def collect(self) -> StepResult | None:
        """See the base class."""
        return self._executor.collect()

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
