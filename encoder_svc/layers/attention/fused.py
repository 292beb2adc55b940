"""The backend of GPUs: windows in one Triton kernel, whole frames in FlashAttention.

A window's kernel turns queries and keys as it loads them, so the joined projection is read once and
nothing but the result is written. Frames are long: they are turned first, once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from encoder_svc.layers.attention.base import Segments
from encoder_svc.layers.attention.reference import ReferenceAttention
from encoder_svc.layers.rotary import Angles

_SHORT = 128  # tokens of a segment whose scores fit one program's registers
_HALF_TYPES = (torch.float16, torch.bfloat16)


class FusedAttention:
    """See `SegmentAttention`. On a CPU, in float32 and without angles it is the reference."""

    def __init__(self) -> None:
        self._plain = ReferenceAttention()

    def __call__(self, qkv_N3HD: Tensor, angles: Angles | None, segments: Segments) -> Tensor:
        """Returns [N, H * D]."""
        if not qkv_N3HD.is_cuda or qkv_N3HD.dtype not in _HALF_TYPES or angles is None:
            return self._plain(qkv_N3HD, angles, segments)
        from encoder_svc.layers.attention.windows_triton import attend_windows, turn

        if segments.longest <= _SHORT:
            return attend_windows(qkv_N3HD, angles, segments)
        q_NHD, k_NHD = turn(qkv_N3HD, angles)
        return attend_frames(q_NHD, k_NHD, qkv_N3HD[:, 2], segments)


def attend_frames(q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, segments: Segments) -> Tensor:
    """Segments of any length by FlashAttention 2 as torch ships it. Returns [N, H * D]."""
    from torch.nn.attention.varlen import varlen_attn

    edges, longest = segments.edges, segments.longest
    out = varlen_attn(q_NHD, k_NHD, v_NHD, edges, edges, longest, longest)
    assert isinstance(out, Tensor)
    return out.flatten(1)
