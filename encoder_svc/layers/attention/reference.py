"""Torch's scaled dot product attention, one call for all segments of a length. Runs everywhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from encoder_svc.layers.attention.base import Group, Segments


class ReferenceAttention:
    """See `SegmentAttention`. A tower has a handful of lengths: whole windows, edges, frames."""

    def __call__(self, q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, segments: Segments) -> Tensor:
        """Returns [N, H * D]."""
        if len(segments.groups) == 1:
            return _attend(q_NHD, k_NHD, v_NHD, segments.groups[0])
        out = torch.empty_like(q_NHD).flatten(1)
        for group in segments.groups:
            out[group.where] = _attend(
                q_NHD[group.where], k_NHD[group.where], v_NHD[group.where], group
            )
        return out


def _attend(q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, group: Group) -> Tensor:
    shape = (group.count, group.length, *q_NHD.shape[1:])
    attended = F.scaled_dot_product_attention(
        q_NHD.reshape(shape).transpose(1, 2),
        k_NHD.reshape(shape).transpose(1, 2),
        v_NHD.reshape(shape).transpose(1, 2),
    )
    return attended.transpose(1, 2).reshape(group.count * group.length, -1)
