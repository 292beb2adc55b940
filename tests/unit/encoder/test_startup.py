"""What stops a worker before it serves: settings and checkpoints that cannot be."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from chiasm.checkpoint import resolve_model
from chiasm.config import EncoderConfig, ServerConfig
from chiasm.errors import Unavailable
from chiasm.server import Server
from encoder_svc.models.qwen2_5_vl import VisionConfig
from encoder_svc.models.registry import tower_class
from encoder_svc.pixels.settings import PixelSettings, read_settings
from encoder_svc.runner import resolve_device, resolve_dtype
from encoder_svc.worker import describe, load_parts, serve_worker

VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resolve_model("demo"), tmp_path / "checkpoint"))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_published_dialect_and_defaults() -> None:
    hub = {**VISION, "in_chans": 3, "spatial_patch_size": 14, "tokens_per_second": 2}
    config = VisionConfig.from_hf(hub)
    assert (config.window_size, config.window_cells, config.rope_theta) == (112, 4, 10000.0)
    assert config.full_blocks == {7, 15, 23, 31}
    assert config.geometry.patch_values == 1176


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": None}, "depth is missing"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_heads": 3}, "multiple of 4 x num_heads"),
        ({"window_size": 14}, "holds no merge cell"),
    ],
)
def test_vision_config_that_cannot_be(changes: dict[str, object], message: str) -> None:
    config = {k: v for k, v in {**VISION, **changes}.items() if v is not None}
    with pytest.raises(ValueError, match=message):
        VisionConfig.from_hf(config)


def test_unknown_architecture() -> None:
    with pytest.raises(ValueError, match="'LlavaFor.*known: .*Qwen2_5_VLFor"):
        tower_class("LlavaForConditionalGeneration")


def test_names_of_devices_and_dtypes() -> None:
    cpu = torch.device("cpu")
    assert resolve_device("cpu") == cpu
    assert resolve_dtype("auto", cpu) is torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) is torch.bfloat16
    for name in ("gpu", "cuda:99", "mps", ""):
        with pytest.raises(ValueError, match="--device"):
            resolve_device(name)
    with pytest.raises(ValueError, match="unknown dtype 'int8'"):
        resolve_dtype("int8", cpu)


def test_processor_files(checkpoint: Path) -> None:
    image, video = read_settings(checkpoint)
    assert image == video and image.geometry.merge == 2
    (checkpoint / "video_preprocessor_config.json").unlink()
    assert read_settings(checkpoint) == (image, image)
    edit(checkpoint / "preprocessor_config.json", image_mean=[0.5, 0.5, 0.5], do_rescale=False)
    assert read_settings(checkpoint)[0].mean == (0.5, 0.5, 0.5)
    for changes in ({"do_resize": False}, {"image_std": [1.0]}, {"resample": 17}):
        with pytest.raises(ValueError, match="do_resize|image_std|17"):
            PixelSettings.from_hf(changes)
    (checkpoint / "preprocessor_config.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        read_settings(checkpoint)
    (checkpoint / "preprocessor_config.json").unlink()
    with pytest.raises(ValueError, match=r"no preprocessor_config\.json"):
        read_settings(checkpoint)


def test_processor_and_tower_disagree(checkpoint: Path) -> None:
    edit(checkpoint / "preprocessor_config.json", patch_size=16)
    edit(checkpoint / "video_preprocessor_config.json", patch_size=16)
    with pytest.raises(ValueError, match="the processor cuts"):
        serve_worker(EncoderConfig(model=str(checkpoint)))


def test_a_tower_that_makes_nonsense_does_not_serve(checkpoint: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(checkpoint / "model.safetensors")
    tensors["visual.merger.ln_q.weight"].fill_(float("nan"))
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(ValueError, match="not finite, for a blank picture"):
        load_parts(EncoderConfig(model=str(checkpoint)))


def test_nixl_that_is_asked_for_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu13._api", None)
    monkeypatch.setitem(sys.modules, "nixl_cu12._api", None)
    with pytest.raises(ValueError, match="--transport nixl: nixl cannot be used"):
        load_parts(EncoderConfig(model="demo", transport="nixl"))
    assert load_parts(EncoderConfig(model="demo", transport="auto")).transfer is None


async def test_a_taken_port_costs_no_loading() -> None:
    taken = Server("127.0.0.1", 0)
    config = EncoderConfig(model="/nowhere", server=ServerConfig(port=taken.port))
    with pytest.raises(Unavailable, match="in use"):
        await asyncio.to_thread(serve_worker, config)
    await taken.grpc.stop(0)


def test_a_wildcard_is_not_advertised() -> None:
    config = EncoderConfig(model="demo", server=ServerConfig(host="0.0.0.0"))
    parts = load_parts(config)
    assert not describe(config, parts, 7000).advertised_address.startswith("0.0.0.0")
    named = EncoderConfig(
        model="demo", server=ServerConfig(host="0.0.0.0", advertise_host="10.1.2.3")
    )
    assert describe(named, parts, 7000).advertised_address == "10.1.2.3:7000"
