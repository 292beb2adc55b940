"""The tower's kernels against plain torch, at the head size and the windows of Qwen2.5-VL."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from bench.tower import QWEN_7B, random_patches, random_tower
from chiasm.kernels.activation import silu_and_mul
from chiasm.kernels.norm import add_rms_norm
from chiasm.plan import Grid
from encoder_svc.graphs import GraphedTower
from encoder_svc.layers.attention.base import Segments
from encoder_svc.layers.attention.fused import FusedAttention
from encoder_svc.layers.attention.reference import ReferenceAttention
from encoder_svc.layers.mlp import GatedMLP
from encoder_svc.layers.rotary import Angles

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
LENGTHS = {
    "windows": [64, 64, 32, 8, 4],
    "long windows": [128, 100],
    "frames": [640, 131, 64, 1],
    "one frame": [6400],
}


def near(found: torch.Tensor, expected: torch.Tensor, limit: float = 5e-3) -> bool:
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    return bool(error < limit)


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("head_dim", [80, 72, 64, 24])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention(name: str, head_dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator(CUDA).manual_seed(1)
    lengths = LENGTHS[name]
    tokens = sum(lengths)
    qkv = torch.randn(tokens, 3, 4, head_dim, device=CUDA, dtype=dtype, generator=generator)
    turns = torch.randn(tokens, head_dim // 2, device=CUDA, generator=generator)
    angles = Angles(turns.cos(), turns.sin())
    segments = Segments.from_lengths(lengths, CUDA)
    expected = ReferenceAttention()(qkv.double().float(), angles, segments)
    assert near(FusedAttention()(qkv, angles, segments), expected)


def test_a_neighbour_that_is_not_finite_stays_alone() -> None:
    """Segments end where tiles do not: what lies behind must not leak, not even as 0 x nan."""
    lengths = [200, 200, 30, 30]
    segments = Segments.from_lengths(lengths, CUDA)
    qkv = torch.randn(sum(lengths), 3, 4, 80, device=CUDA, dtype=torch.bfloat16)
    turns = torch.randn(sum(lengths), 40, device=CUDA)
    angles = Angles(turns.cos(), turns.sin())
    qkv[200:400] = torch.nan
    found = FusedAttention()(qkv, angles, segments)
    assert found[:200].isfinite().all() and found[400:].isfinite().all()
    short = Segments.from_lengths([30, 30], CUDA)
    some = Angles(angles.cos[:60], angles.sin[:60])
    qkv[30:60] = torch.nan
    assert FusedAttention()(qkv[:60].contiguous(), some, short)[:30].isfinite().all()


def test_norm_and_gate() -> None:
    x, delta = torch.randn(2, 50, 1280, device=CUDA, dtype=torch.bfloat16)
    weight = torch.randn(1280, device=CUDA, dtype=torch.bfloat16)
    total, normed = add_rms_norm(x, delta, weight, eps=1e-6)
    assert torch.equal(total, x + delta)
    assert near(normed, F.rms_norm(total.float(), (1280,), weight.float(), 1e-6))
    joined = torch.randn(50, 6848, device=CUDA, dtype=torch.bfloat16)
    bias = torch.randn(6848, device=CUDA, dtype=torch.bfloat16)
    gate, up = (joined.float() + bias.float()).chunk(2, dim=-1)
    assert near(silu_and_mul(joined, bias=bias), F.silu(gate) * up)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1000, 1024, 1500, 6400])
@torch.inference_mode()
def test_gated_block(rows: int, bias: bool) -> None:
    """An inner width that is no multiple of 8, more rows than whole tiles."""
    torch.manual_seed(3)
    block = GatedMLP(1280, 3420, bias=bias).to(CUDA)
    gate, up, down = (
        (layer.weight.double(), layer.bias.double() if bias else None)
        for layer in (block.gate_proj, block.up_proj, block.down_proj)
    )
    x = torch.randn(rows, 1280, device=CUDA, dtype=torch.bfloat16)
    wide = x.double()
    expected = F.linear(F.silu(F.linear(wide, *gate)) * F.linear(wide, *up), *down)
    block.to(torch.bfloat16).finish()
    assert near(block(x), expected, 1e-2)


@torch.inference_mode()
def test_a_full_tower_in_each_dtype_and_as_a_graph() -> None:
    grids = [Grid(1, 36, 90), Grid(1, 16, 16)]
    wide = random_tower(QWEN_7B, device=CUDA, dtype=torch.float32, attention="reference")
    expected = wide(random_patches(QWEN_7B, grids, device=CUDA, dtype=torch.float32), grids)
    for dtype in (torch.bfloat16, torch.float16):
        tower = random_tower(QWEN_7B, device=CUDA, dtype=dtype)
        patches = random_patches(QWEN_7B, grids, device=CUDA, dtype=torch.float32).to(dtype)
        tower.load_state_dict(wide.state_dict())
        rows = tower(patches, grids).clone()
        assert torch.cosine_similarity(rows.float(), expected).min() > 0.995
        graphed = GraphedTower(tower, keep=1, max_patches=10**6)
        for _ in range(6):  # from the fourth on as a graph
            assert torch.equal(graphed(patches, grids), rows)
