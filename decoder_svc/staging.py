"""Small arrays on their way from the host to the device a step runs on."""

from __future__ import annotations

import numpy as np
import torch


def stage(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array on the device. To a GPU it goes through pinned memory, and nobody waits for it."""
    if device.type == "cpu":
        return torch.from_numpy(array)
    # The allocator of pinned memory hands a block out again only when copies from it have ended.
    pinned = torch.empty(array.shape, dtype=torch.from_numpy(array[:0]).dtype, pin_memory=True)
    pinned.numpy()[...] = array
    return pinned.to(device, non_blocking=True)
