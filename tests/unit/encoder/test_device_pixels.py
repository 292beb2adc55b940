"""Patches made on a device are those made on the CPU, bit for bit; here the device is the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from encoder_svc.geometry import Geometry
from encoder_svc.pixels.device import DevicePatchifier
from encoder_svc.pixels.patches import Patchifier
from encoder_svc.pixels.settings import PixelSettings

torch.set_num_threads(1)
SETTINGS = PixelSettings(Geometry(patch=14, temporal_patch=2, merge=2))
_RANDOM = np.random.default_rng(3)
SIZES = [
    ((1080, 1920), (1092, 1932)),
    ((56, 56), (56, 56)),
    ((300, 56), (140, 56)),
    ((56, 300), (56, 140)),
    ((20, 20), (560, 1120)),
    ((500, 700), (28, 28)),
    *(
        (tuple(_RANDOM.integers(20, 900, 2)), tuple(28 * _RANDOM.integers(1, 20, 2)))
        for _ in range(24)
    ),
]


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """Noise: every weight and every rounding shows, overshoot at both ends too."""
    rng = np.random.default_rng(seed + height * 10_000 + width)
    return Image.fromarray(rng.choice([0, 255, 128, 3], (height, width, 3)).astype(np.uint8))


def makers(dtype: torch.dtype = torch.float32) -> tuple[Patchifier, DevicePatchifier]:
    device = torch.device("cpu")
    return Patchifier(SETTINGS), DevicePatchifier(SETTINGS, device=device, dtype=dtype)


@pytest.mark.parametrize(("source", "planned"), SIZES)
def test_pictures(source: tuple[int, int], planned: tuple[int, int]) -> None:
    image, (height, width) = picture(*source), planned
    plain, device = makers()
    expected = plain.patchify([plain.resize(image, height=height, width=width)])
    found = device.patchify([device.resize(image, height=height, width=width)]).ready()
    assert np.array_equal(found.numpy(), expected)


def test_clips_and_rounding() -> None:
    """Frames of two sizes in one unit, as after a turn in mid-clip; rounded as a tower would."""
    plain, device = makers(torch.bfloat16)
    frames = [picture(90, 160, 1), picture(90, 160, 2), picture(160, 90, 3), picture(90, 160, 4)]
    expected = plain.patchify([plain.resize(f, height=84, width=168) for f in frames])
    found = device.patchify([device.resize(f, height=84, width=168) for f in frames]).ready()
    assert torch.equal(found, torch.from_numpy(expected).bfloat16())


def test_far_larger_frames_are_resized_at_once() -> None:
    """What waits for the tower takes memory in proportion to its patches."""
    _, device = makers()
    assert device.resize(picture(600, 600), height=280, width=280).pixels.shape == (280, 280, 3)
    assert device.resize(picture(500, 500), height=280, width=280).pixels.shape == (500, 500, 3)
