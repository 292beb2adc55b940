"""The real encoder, slowed on command: `python -m tests.integration.delayed_encoder`.

Before each item it says `encoding <patches>` and sleeps as long as `delays` says, for all items or
for items of so many patches; and it prints a line after each: `encoded <patches>`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from chiasm.cli.service import run_service
from chiasm.config import EncoderConfig
from encoder_svc.messages import RowBuffer
from encoder_svc.work import PreparedUnit, RunFailure, Runner
from encoder_svc.worker import Parts, load_parts, serve_worker
from tests.integration import delays


class DelayedRunner:
    """A `Runner` that takes its time, and no core."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.family = runner.family
        self.geometry = runner.geometry
        self.row_format = runner.row_format

    def run(
        self, batch: Sequence[PreparedUnit], *, segment_rows: int
    ) -> Sequence[tuple[RowBuffer, ...] | RunFailure]:
        """See `encoder_svc.work.Runner`."""
        for unit in batch:
            name = str(unit.grid.patches)
            print(f"encoding {name}", flush=True)
            delays.wait(lambda file, name=name: file.get(name, file.get("all", 0.0)))  # type: ignore[misc]
        outcome = self._runner.run(batch, segment_rows=segment_rows)
        for unit in batch:
            print(f"encoded {unit.grid.patches}", flush=True)
        return outcome


def main(config: EncoderConfig) -> None:
    serve_worker(config, load)


def load(config: EncoderConfig) -> Parts:
    parts = load_parts(config)
    return replace(parts, runner=DelayedRunner(parts.runner))


if __name__ == "__main__":
    run_service(EncoderConfig, "tests.integration.delayed_encoder:main")
