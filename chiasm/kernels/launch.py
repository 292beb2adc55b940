"""When a kernel runs instead of its torch version, and how it is launched."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
"""Kernels run on CPU tensors, line by line (for tests)."""


def compiled(tensor: torch.Tensor) -> bool:
    """Whether kernels run on this tensor; otherwise the torch version does."""
    return HAS_TRITON and (tensor.is_cuda or INTERPRETED)


def overlapping(tensor: torch.Tensor) -> dict[str, Any]:
    """Launch options, and the constant `early`, of a kernel that may start before its inputs exist.

    Programmatic dependent launch (compute capability 9 and up): the kernel starts while the one
    before it in the stream ends, and waits for it (`gdc_wait`) before it touches what that one
    wrote.
    """
    if INTERPRETED or not tensor.is_cuda or capability(tensor.device.index) < 9:
        return {"early": False}
    return {"early": True, "launch_pdl": True}


@functools.cache
def capability(index: int | None) -> int:
    """The major compute capability of a GPU."""
    return torch.cuda.get_device_capability(index)[0]


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()


def ceil_div(number: int, parts: int) -> int:
    """Quotient, rounded up."""
    return -(-number // parts)
