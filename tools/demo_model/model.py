"""A batched Qwen2.5-VL whose parameter names are the hub layout's own.

Pictures of one call share a grid, so a window is one dense mask instead of a loop.
Shapes: B rows, I pictures, P patches of one picture, S text positions, H hidden.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.demo_model import spec

Grid = tuple[int, int, int]  # frames / temporal patch, patch rows, patch columns


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + spec.NORM_EPS)
        return self.weight * scaled.to(x.dtype)


class GatedMLP(nn.Module):
    """SiLU-gated MLP; the vision tower's has biases."""

    def __init__(self, hidden: int, inner: int, *, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding in the half-split convention; angles broadcast over heads."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x.float() * cos + turned * sin).to(x.dtype)


class VisionAttention(nn.Module):
    """Self-attention over the patches of each picture."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(spec.VISION_HIDDEN, 3 * spec.VISION_HIDDEN)
        self.proj = nn.Linear(spec.VISION_HIDDEN, spec.VISION_HIDDEN)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """Attend within `mask` ([P, P] of booleans, None for all)."""
        batch, patches, _ = x.shape
        query, key, value = (
            self.qkv(x).view(batch, patches, 3, spec.NUM_HEADS, -1).permute(2, 0, 3, 1, 4)
        )
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.proj(mixed.transpose(1, 2).reshape(batch, patches, -1))


class VisionBlock(nn.Module):
    """One pre-norm block of the tower."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = RMSNorm(spec.VISION_HIDDEN)
        self.norm2 = RMSNorm(spec.VISION_HIDDEN)
        self.attn = VisionAttention()
        self.mlp = GatedMLP(spec.VISION_HIDDEN, spec.VISION_MLP, bias=True)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """Apply the block."""
        x = x + self.attn(self.norm1(x), cos, sin, mask)
        return x + self.mlp(self.norm2(x))


class PatchEmbed(nn.Module):
    """Linear map of flattened patches, stored as the 3-D convolution it is."""

    def __init__(self) -> None:
        super().__init__()
        kernel = (spec.TEMPORAL_PATCH, spec.PATCH, spec.PATCH)
        self.proj = nn.Conv3d(3, spec.VISION_HIDDEN, kernel, stride=kernel, bias=False)

    def forward(self, patches: Tensor) -> Tensor:
        """Embed [..., 3 * temporal * patch * patch]."""
        return F.linear(patches, self.proj.weight.flatten(1))


class Merger(nn.Module):
    """Joins each 2x2 of patches into one text-width row."""

    def __init__(self) -> None:
        super().__init__()
        width = spec.VISION_HIDDEN * spec.MERGE**2
        self.ln_q = RMSNorm(spec.VISION_HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, spec.HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, P, h] to [B, P/4, H]; patches of a merge unit are neighbours in P."""
        return self.mlp(self.ln_q(x).reshape(x.shape[0], -1, spec.VISION_HIDDEN * spec.MERGE**2))


@functools.cache
def patch_coordinates(grid: Grid) -> Tensor:
    """Give (frame, row, column) of each patch in processor order: merge unit by merge unit."""
    frames, rows, columns = grid
    index = torch.stack(
        torch.meshgrid(
            torch.arange(frames), torch.arange(rows), torch.arange(columns), indexing="ij"
        ),
        dim=-1,
    )
    units = index.view(frames, rows // spec.MERGE, spec.MERGE, columns // spec.MERGE, spec.MERGE, 3)
    return units.permute(0, 1, 3, 2, 4, 5).reshape(-1, 3)


@functools.cache
def vision_geometry(grid: Grid, device: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Give rotary cos and sin [P, head], the full-attention mask and the window mask [P, P]."""
    where = patch_coordinates(grid)
    head = spec.VISION_HIDDEN // spec.NUM_HEADS
    inverse = 1.0 / (10000.0 ** (torch.arange(0, head // 2, 2).float() / (head // 2)))
    angles = (where[:, 1:, None].float() * inverse).flatten(1)
    angles = torch.cat((angles, angles), dim=-1)
    side = spec.WINDOW // spec.PATCH
    window = where // torch.tensor([1, side, side])
    same_frame = where[:, None, 0] == where[None, :, 0]
    same_window = (window[:, None] == window[None]).all(-1)
    full = None if grid[0] == 1 else same_frame.to(device)
    return angles.cos().to(device), angles.sin().to(device), full, same_window.to(device)


class VisionTower(nn.Module):
    """The encoder: patches to text-width rows."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed()
        self.blocks = nn.ModuleList(VisionBlock() for _ in range(spec.VISION_DEPTH))
        self.merger = Merger()

    def forward(self, patches: Tensor, grid: Grid) -> Tensor:
        """Encode [B, P, pixels] of one grid to [B, P/4, H]."""
        cos, sin, full, window = vision_geometry(grid, str(patches.device))
        x = self.patch_embed(patches)
        for index, block in enumerate(self.blocks):
            x = block(x, cos, sin, full if index in spec.FULL_ATTENTION else window)
        return self.merger(x)


class TextAttention(nn.Module):
    """Causal self-attention with sectioned M-RoPE."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(spec.HIDDEN, spec.HIDDEN)
        self.k_proj = nn.Linear(spec.HIDDEN, spec.HIDDEN)
        self.v_proj = nn.Linear(spec.HIDDEN, spec.HIDDEN)
        self.o_proj = nn.Linear(spec.HIDDEN, spec.HIDDEN, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend causally; padding may only stand on the right."""
        batch, length, _ = x.shape
        shape = (batch, length, spec.NUM_HEADS, spec.HEAD_DIM)
        query, key, value = (
            part(x).view(shape).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class TextLayer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = TextAttention()
        self.mlp = GatedMLP(spec.HIDDEN, spec.TEXT_MLP, bias=False)
        self.input_layernorm = RMSNorm(spec.HIDDEN)
        self.post_attention_layernorm = RMSNorm(spec.HIDDEN)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply the layer."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


def text_angles(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Turn [3, B, S] positions into cos and sin [B, 1, S, head]: sections take turns by axis."""
    half = spec.HEAD_DIM // 2
    frequency = torch.arange(half, device=positions.device).float() / half
    inverse = 1.0 / (spec.ROPE_THETA**frequency)
    angles = positions[..., None].float() * inverse
    parts = angles.split(list(spec.MROPE_SECTION), dim=-1)
    chosen = torch.cat([part[axis] for axis, part in enumerate(parts)], dim=-1)
    chosen = torch.cat((chosen, chosen), dim=-1)[:, None]
    return chosen.cos(), chosen.sin()


class TextModel(nn.Module):
    """The decoder: rows and positions to hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(spec.VOCAB_SIZE, spec.HIDDEN)
        self.layers = nn.ModuleList(TextLayer() for _ in range(spec.NUM_LAYERS))
        self.norm = RMSNorm(spec.HIDDEN)

    def forward(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Run all layers over [B, S, H]."""
        cos, sin = text_angles(positions)
        for layer in self.layers:
            rows = layer(rows, cos, sin)
        return self.norm(rows)


class DemoModel(nn.Module):
    """Tower and decoder with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = VisionTower()
        self.model = TextModel()

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        pictures: list[tuple[Tensor, Grid]],
        slots: Tensor | None,
    ) -> Tensor:
        """Give hidden states [B, S, H]; `slots` [B, N] says where the N picture rows go."""
        rows = self.model.embed_tokens(ids)
        if slots is not None:
            seen = torch.cat([self.visual(patches, grid) for patches, grid in pictures], dim=1).to(
                rows.dtype
            )
            rows = rows.scatter(1, slots[..., None].expand(-1, -1, spec.HIDDEN), seen)
        return self.model(rows, positions)

    def logits(self, hidden: Tensor) -> Tensor:
        """Project hidden states on the tied vocabulary."""
        return F.linear(hidden, self.model.embed_tokens.weight)


def initialise(model: DemoModel, *, seed: int) -> None:
    """Draw all matrices near 1/sqrt(width); the published 0.02 learns several times slower here."""
    torch.manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            continue
        fan_in = weight[0].numel()
        scale = 0.06 if "embed" in name else 0.7 / math.sqrt(fan_in)
        if name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight")):
            scale *= 0.5
        nn.init.trunc_normal_(weight, std=scale)
    for name, weight in model.named_parameters():
        if name.endswith(".bias"):
            nn.init.zeros_(weight)
