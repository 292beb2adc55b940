"""Our pixels are, bit for bit, those of the reference's PIL image processor."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from chiasm.plan import Grid
from encoder_svc.pixels.image import decode_image
from encoder_svc.pixels.modes import to_rgb
from encoder_svc.pixels.patches import Patchifier
from encoder_svc.pixels.settings import PixelSettings, read_settings
from tests import torchvision_ops

torchvision_ops.declare()
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (  # noqa: E402
    Qwen2VLImageProcessorPil,
    smart_resize,
)
from transformers.models.qwen2_vl.video_processing_qwen2_vl import (  # noqa: E402
    Qwen2VLVideoProcessor,
)

DEMO = Path(__file__).resolve().parents[2] / "chiasm" / "demo" / "checkpoint"
CONFIG = json.loads((DEMO / "preprocessor_config.json").read_text())
SETTINGS = PixelSettings.from_hf(CONFIG)
REFERENCE = Qwen2VLImageProcessorPil(**{k: v for k, v in CONFIG.items() if k != "processor_class"})
_SIZES = np.random.default_rng(7).integers(20, 700, size=(26, 2)).tolist()
SIZES = [(28, 28), (56, 56), (224, 224), (2530, 1000), *map(tuple, _SIZES)]


def picture(height: int, width: int) -> Image.Image:
    """Noise over a gradient: resampling and rounding both show."""
    rng = np.random.default_rng(height * 10_000 + width)
    ramp = np.linspace(0, 200, width)[None, :, None]
    noise = rng.integers(0, 56, size=(height, width, 3))
    return Image.fromarray((ramp + noise).astype(np.uint8))


def ours(image: Image.Image) -> tuple[np.ndarray, Grid]:
    height, width = smart_resize(
        image.height, image.width, 28, CONFIG["min_pixels"], CONFIG["max_pixels"]
    )
    patchifier = Patchifier(SETTINGS)
    patches = patchifier.patchify([patchifier.resize(image, height=height, width=width)])
    return patches, Grid(1, height // 14, width // 14)


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_equal_to_the_reference(height: int, width: int) -> None:
    image = picture(height, width)
    expected = REFERENCE(images=[image], return_tensors="np")
    patches, grid = ours(image)
    assert [grid.t, grid.h, grid.w] == expected["image_grid_thw"][0].tolist()
    assert patches.dtype == np.float32
    assert np.array_equal(patches, expected["pixel_values"])


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGBA", "CMYK", "YCbCr"])
def test_modes_as_the_reference_converts_them(mode: str) -> None:
    source = picture(40, 60)
    if mode in ("LA", "PA", "RGBA"):
        source.putalpha(Image.linear_gradient("L").resize(source.size))
    image = source.convert(mode)
    expected = REFERENCE(images=[image], return_tensors="np")["pixel_values"]
    assert np.array_equal(ours(to_rgb(image))[0], expected)


def test_transparent_palette_as_the_reference_converts_it() -> None:
    image = picture(40, 60).convert("P")
    image.info["transparency"] = 3
    expected = REFERENCE(images=[image], return_tensors="np")["pixel_values"]
    assert np.array_equal(ours(to_rgb(image))[0], expected)


def test_from_a_file() -> None:
    image = picture(333, 217)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=80)
    decoded = decode_image(file.getvalue(), "image/jpeg", height=333, width=217)
    expected = REFERENCE(images=[Image.open(file)], return_tensors="np")["pixel_values"]
    assert np.array_equal(ours(decoded)[0], expected)


def test_clip_frames_equal_pictures() -> None:
    """Row by row: temporal slice k of a clip's patch is that of frame k as a still picture."""
    patchifier = Patchifier(SETTINGS)
    frames = [patchifier.resize(picture(112 + i, 140), height=112, width=140) for i in range(4)]
    clip = patchifier.patchify(frames).reshape(2, -1, 3, 2, 14, 14)
    for index, frame in enumerate(frames):
        still = patchifier.patchify([frame]).reshape(-1, 3, 2, 14, 14)
        group, slot = divmod(index, 2)
        assert np.array_equal(clip[group, :, :, slot], still[:, :, 0])
        assert np.array_equal(still[:, :, 0], still[:, :, 1])


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_clips_are_near_the_torchvision_reference(count: int) -> None:
    """Given the same frames. It resizes otherwise than PIL: two of 256 levels at the very most."""
    config = json.loads((DEMO / "video_preprocessor_config.json").read_text())
    names = ("processor_class", "video_processor_type")
    reference = Qwen2VLVideoProcessor(**{k: v for k, v in config.items() if k not in names})
    frames = [picture(120 + index, 160).resize((160, 120)) for index in range(count)]
    stacked = torch.from_numpy(np.stack([np.asarray(frame) for frame in frames]))
    expected = reference(
        videos=[stacked.permute(0, 3, 1, 2)], do_sample_frames=False, return_tensors="pt"
    )
    t, h, w = expected["video_grid_thw"][0].tolist()
    patchifier = Patchifier(read_settings(DEMO)[1])
    resized = [patchifier.resize(frame, height=14 * h, width=14 * w) for frame in frames]
    resized += [resized[-1]] * (-count % 2)
    difference = patchifier.patchify(resized) - expected["pixel_values_videos"].numpy()
    assert len(difference) == t * h * w
    assert np.abs(difference).max() <= 2.01 / 255 / min(config["image_std"])
    assert np.abs(difference).mean() < 0.005
