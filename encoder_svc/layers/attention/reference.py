"""Torch's scaled dot product attention, one call for all segments of a length. Runs everywhere."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from encoder_svc.layers.attention.base import Group, Segments
from encoder_svc.layers.rotary import Angles, rotate


class ReferenceAttention:
    """See `SegmentAttention`. A tower has a handful of lengths: whole windows, edges, frames."""

    def __call__(self, qkv_N3HD: Tensor, angles: Angles | None, segments: Segments) -> Tensor:
        """Returns [N, H * D]."""
        q_NHD, k_NHD, v_NHD = qkv_N3HD.unbind(1)
        if angles is not None:
            q_NHD, k_NHD = rotate(q_NHD, angles), rotate(k_NHD, angles)
        return attend(q_NHD, k_NHD, v_NHD, segments)


def attend(q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, segments: Segments) -> Tensor:
    """Attention of tokens that are turned already. Returns [N, H * D]."""
    if len(segments.groups) == 1:
        return _attend(q_NHD, k_NHD, v_NHD, segments.groups[0])
    out = q_NHD.new_empty(q_NHD.shape).flatten(1)
    for group in segments.groups:
        at = group.where
        out[at] = _attend(q_NHD[at], k_NHD[at], v_NHD[at], group)
    return out


def _attend(q_NHD: Tensor, k_NHD: Tensor, v_NHD: Tensor, group: Group) -> Tensor:
    shape = (group.count, group.length, *q_NHD.shape[1:])
    attended = F.scaled_dot_product_attention(
        q_NHD.reshape(shape).transpose(1, 2),
        k_NHD.reshape(shape).transpose(1, 2),
        v_NHD.reshape(shape).transpose(1, 2),
    )
    return attended.transpose(1, 2).reshape(group.count * group.length, -1)
