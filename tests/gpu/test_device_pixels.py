"""Patches made on a GPU are those made on the CPU, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from encoder_svc.geometry import Geometry
from encoder_svc.pixels.device import DevicePatchifier
from encoder_svc.pixels.patches import Patchifier
from encoder_svc.pixels.settings import PixelSettings

pytestmark = pytest.mark.gpu
SETTINGS = PixelSettings(Geometry(patch=14, temporal_patch=2, merge=2))


@pytest.mark.parametrize("planned", [(1092, 1932), (560, 1008), (1120, 980)])
def test_equal_to_the_cpu(planned: tuple[int, int]) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (1080, 1920, 3), dtype=np.uint8)
    image, to = Image.fromarray(noise), {"height": planned[0], "width": planned[1]}
    plain = Patchifier(SETTINGS)
    device = DevicePatchifier(SETTINGS, device=torch.device("cuda"), dtype=torch.float32)
    expected = plain.patchify([plain.resize(image, **to)])
    for _ in range(3):
        found = device.patchify([device.resize(image, **to)]).ready()
        assert np.array_equal(found.cpu().numpy(), expected)
