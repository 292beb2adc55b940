"""Pixels of a patch to its first features."""

from __future__ import annotations

from torch import Tensor, nn

from encoder_svc.geometry import Geometry


class PatchEmbed(nn.Module):
    """The reference's convolution whose stride is its kernel: one matrix product."""

    def __init__(self, geometry: Geometry, hidden_size: int, *, bias: bool = True) -> None:
        super().__init__()
        self.proj = nn.Linear(geometry.patch_values, hidden_size, bias=bias)

    def forward(self, patches: Tensor) -> Tensor:
        """[N, patch values] of any float dtype to [N, C]."""
        out: Tensor = self.proj(patches.to(self.proj.weight.dtype))
        return out
