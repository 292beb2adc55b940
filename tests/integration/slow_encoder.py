"""An encoder whose tower takes its time and no core: `python -m tests.integration.slow_encoder`.

Flags as for `python -m encoder_svc`. Everything but the tower is real; how long it takes, `delays`
says.
"""

from __future__ import annotations

from chiasm.checkpoint import resolve_model
from chiasm.cli.service import run_service
from chiasm.config import EncoderConfig
from chiasm.digest import processor_digest, tower_digest
from encoder_svc.pixels.settings import read_settings
from encoder_svc.processor import Processor
from encoder_svc.worker import Parts, serve_worker
from tests.fake_runner import FakeRunner
from tests.integration.delayed_encoder import DelayedRunner

HIDDEN_SIZE = 8


def main(config: EncoderConfig) -> None:
    serve_worker(config, load)


def load(config: EncoderConfig) -> Parts:
    model_dir = resolve_model(config.model)
    return Parts(
        runner=DelayedRunner(FakeRunner(hidden_size=HIDDEN_SIZE)),
        processor=Processor(*read_settings(model_dir)),
        tower_digest=tower_digest(model_dir),
        processor_digest=processor_digest(model_dir),
    )


if __name__ == "__main__":
    run_service(EncoderConfig, "tests.integration.slow_encoder:main")
