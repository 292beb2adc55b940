"""Starts what the settings ask for: one worker in this process, or several beside it."""

from __future__ import annotations

from chiasm.config import EncoderConfig


def main(config: EncoderConfig) -> None:
    """Serves until SIGTERM, then drains and returns.

    Raises:
        ValueError: Settings or a checkpoint that cannot be served.
        ChiasmError: The port is taken, or a worker does not start.
    """
    # Imported here: who only watches over workers needs no torch.
    if config.dp_size > 1:
        from encoder_svc.replicas import serve_replicas

        serve_replicas(config)
    else:
        from encoder_svc.worker import serve_worker

        serve_worker(config)
