"""Many random requests: no number that is not finite, no memory that stays behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.engine import BenchEngine
from bench.shapes import write_shape
from bench.soak import soak
from chiasm.config.decoder import DecoderConfig, MemoryConfig, SchedulerConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
REQUESTS = 3000


def test_nothing_fails_and_nothing_grows(tmp_path: Path) -> None:
    shape = write_shape(tmp_path, num_layers=2)
    config = DecoderConfig(
        model=str(shape),
        load_format="dummy",
        max_model_len=2048,
        memory=MemoryConfig(kv_blocks=4096),
        scheduler=SchedulerConfig(max_running_requests=64),
    )
    engine = BenchEngine(config, shape)
    try:
        report = soak(engine, REQUESTS, vocabulary=engine.text.vocab_size)
    finally:
        engine.close()
    assert not report.failed
    assert report.gpu_growth < 64
    assert report.host_growth < 64
