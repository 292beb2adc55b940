"""What `chiasm up` starts."""

from __future__ import annotations

import pytest
import yaml

from chiasm.cli.machine import Layout


def described(layout: Layout) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = yaml.safe_load(layout.describe({}))
    return found


def test_an_encoder_on_each_gpu_of_the_decoder() -> None:
    layout = Layout(tp_size=2, pp_size=2, mm_enable_dp_encoder=True, encoders=1)
    assert layout.num_encoders == 4
    devices = [layout.encoder(index).command for index in range(4)]
    for index, command in enumerate(devices):
        assert command[command.index("--device") + 1] == f"auto:{index}"
        assert "--shared-gpu" in command
    trees = described(layout)
    assert trees["encoder"]["shared_gpu"] is True
    assert trees["encoder"]["max_batch_patches"] == 8192
    assert trees["decoder"]["memory"]["mem_fraction_static"] == 0.8  # type: ignore[index]


def test_what_the_user_says_goes_before_what_sharing_needs() -> None:
    trees = described(
        Layout(
            tp_size=2,
            mm_enable_dp_encoder=True,
            encoder_args="--max-batch-patches 4096 --num-threads 3",
            decoder_args="--mem-fraction-static 0.7",
        )
    )
    assert trees["encoder"]["max_batch_patches"] == 4096
    assert trees["encoder"]["num_threads"] == 3
    assert trees["decoder"]["memory"]["mem_fraction_static"] == 0.7  # type: ignore[index]


@pytest.mark.parametrize("encoders", [1, 3])
def test_apart_unless_asked_for(encoders: int) -> None:
    layout = Layout(encoders=encoders, tp_size=2)
    assert layout.num_encoders == encoders
    assert "--shared-gpu" not in layout.encoder(0).command
    assert described(layout)["encoder"]["shared_gpu"] is False
