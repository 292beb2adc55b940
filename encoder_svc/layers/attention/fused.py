"""The backend of GPUs: kernels of our own for windows and for whole frames."""

from __future__ import annotations

import torch
from torch import Tensor

from encoder_svc.layers.attention.base import Segments
from encoder_svc.layers.attention.reference import ReferenceAttention
from encoder_svc.layers.rotary import Angles

_HALF_TYPES = (torch.float16, torch.bfloat16)
_HOPPER = (9, 0)


class FusedAttention:
    """See `SegmentAttention`. On a CPU, in float32 and for tiny heads it is the reference, and for
    frames also on GPUs older than Hopper, which have no tensor memory accelerator."""

    def __init__(self) -> None:
        self._plain = ReferenceAttention()

    def __call__(self, qkv_N3HD: Tensor, angles: Angles | None, segments: Segments) -> Tensor:
        """Returns [N, H * D]."""
        if not qkv_N3HD.is_cuda or qkv_N3HD.dtype not in _HALF_TYPES or angles is None:
            return self._plain(qkv_N3HD, angles, segments)
        from encoder_svc.layers.attention.windows_triton import LONGEST, attend_windows, split_head

        if split_head(qkv_N3HD.shape[-1]) is None:
            return self._plain(qkv_N3HD, angles, segments)
        if segments.longest <= LONGEST:
            return attend_windows(qkv_N3HD, angles, segments)
        if torch.cuda.get_device_capability(qkv_N3HD.device) < _HOPPER:
            return self._plain(qkv_N3HD, angles, segments)
        from encoder_svc.layers.attention.frames_triton import attend_frames

        return attend_frames(qkv_N3HD, angles, segments)
