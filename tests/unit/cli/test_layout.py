"""What `chiasm up` starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from chiasm.cli.machine import Layout, num_gpus


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


def places(layout: Layout, count: int) -> list[str]:
    commands = [layout.encoder(index).command for index in range(count)]
    return [command[command.index("--device") + 1] for command in commands]


def test_encoders_get_gpus_of_their_own_where_there_are_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert places(Layout(encoders=2), 2) == ["auto:1", "auto:2"]
    assert places(Layout(encoders=2, tp_size=2), 2) == ["auto:2", "auto:0"]
    assert places(Layout(encoder_args="--device cuda:5"), 1) == ["cuda:5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "--device" not in Layout().encoder(0).command


def test_gpus_are_counted_without_cuda(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert num_gpus({}, tmp_path) == 2
    assert num_gpus({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == 1
    assert num_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == 0
