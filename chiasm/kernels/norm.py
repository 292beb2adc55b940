"""Root mean square normalisation, with the addition before it (Zhang and Sennrich 2019)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def rms_norm(x_NC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    """Normalises the last dimension in float32; returns the weight's dtype.

    The value is rounded to the weight's dtype before it is scaled, as the reference does.
    """
    if x_NC.is_cuda:
        from chiasm.kernels.norm_triton import launch_rms_norm

        return launch_rms_norm(x_NC, None, weight_C, eps=eps)[1]
    return _plain(x_NC, weight_C, eps)


def add_rms_norm(
    x_NC: Tensor, delta_NC: Tensor, weight_C: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`x + delta` in x's dtype, and that sum normalised in the weight's: one pass over memory."""
    if x_NC.is_cuda:
        from chiasm.kernels.norm_triton import launch_rms_norm

        return launch_rms_norm(x_NC, delta_NC, weight_C, eps=eps)
    total = (x_NC + delta_NC).to(x_NC.dtype)
    return total, _plain(total, weight_C, eps)


def _plain(x_NC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    if x_NC.dtype == weight_C.dtype == torch.float32:
        # torch's own rms_norm is a dozen operations on a CPU. With |x| the length of a row,
        # its root mean square is sqrt(|x|^2 + C eps) / sqrt(C).
        length = torch.linalg.vector_norm(x_NC, dim=-1, keepdim=True)
        width = x_NC.shape[-1]
        least = _scalar((width * eps) ** 0.5, x_NC.device)
        return (x_NC / torch.hypot(length, least).mul_(width**-0.5)).mul_(weight_C)
    wide = x_NC.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight_C * (wide * scale).to(weight_C.dtype)


@functools.cache
def _scalar(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, device=device)
