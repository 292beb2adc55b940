"""Triton where it is installed: the one file that imports it.

Without Triton, `jit` leaves a function as it is and no caller reaches it: `compiled()` is false for
every tensor and the plain torch version runs. With `TRITON_INTERPRET=1` in the environment when
Triton is first imported, kernels run on CPU tensors too, line by line (for tests).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

__all__ = [
    "HAS_TRITON",
    "INTERPRETED",
    "Pointer",
    "Scalar",
    "ceil_div",
    "compiled",
    "constexpr",
    "gdc",
    "jit",
    "power_of_two",
    "tl",
]

try:
    import triton
    import triton.language as tl
    from triton.language.extra import cuda as gdc

    HAS_TRITON = True
except ImportError:
    tl, gdc, HAS_TRITON = None, None, False

if TYPE_CHECKING or not HAS_TRITON:
    Pointer: TypeAlias = Any  # a tensor, as a kernel's argument: where its elements begin
    Scalar: TypeAlias = Any  # a number, as a kernel's argument
    constexpr: TypeAlias = Any  # an argument that is compiled in; Triton goes by this name
else:
    Pointer = Scalar = tl.tensor
    constexpr = tl.constexpr

INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"


def jit(function: Callable[..., None]) -> Any:
    """`triton.jit`, or the function itself where there is no Triton."""
    return triton.jit(function) if HAS_TRITON else function


def compiled(tensor: torch.Tensor) -> bool:
    """Whether the kernels run on this tensor; otherwise the torch version does."""
    return HAS_TRITON and (tensor.is_cuda or INTERPRETED)


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()


def ceil_div(number: int, parts: int) -> int:
    """Quotient, rounded up."""
    return -(-number // parts)
