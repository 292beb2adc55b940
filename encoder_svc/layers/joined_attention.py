"""Self-attention of vision towers: one projection for queries, keys and values, and one out."""

from __future__ import annotations

from torch import Tensor, nn

from encoder_svc.layers.attention.base import SegmentAttention, Segments
from encoder_svc.layers.rotary import Angles, pair_up


class JoinedAttention(nn.Module):
    """Multi-head attention within segments, rotary in two dimensions.

    Args:
        hidden_size: C, a multiple of `num_heads`.
        num_heads: H.
        backend: Attends.
        qkv_bias: Whether the projection in has a bias.
        out_bias: Whether the one out has.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        backend: SegmentAttention,
        *,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ) -> None:
        super().__init__()
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=qkv_bias)
        self.proj = nn.Linear(hidden_size, hidden_size, bias=out_bias)
        self._heads = (3, num_heads, hidden_size // num_heads)
        self._attend = backend

    def finish(self) -> None:
        """Puts queries and keys in the order of `encoder_svc.layers.rotary`."""
        _, heads, head_dim = self._heads
        turned = 2 * heads * head_dim
        for parameter in self.qkv.parameters():
            parameter.data[:turned] = pair_up(parameter.data[:turned], head_dim=head_dim)

    def forward(self, x_NC: Tensor, segments: Segments, angles: Angles) -> Tensor:
        """Returns [N, C]. After `finish`."""
        qkv_N3HD = self.qkv(x_NC).unflatten(-1, self._heads)
        out: Tensor = self.proj(self._attend(qkv_N3HD, angles, segments))
        return out
