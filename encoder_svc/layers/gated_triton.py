"""`silu(x @ gate + b) * (x @ up + c)` in one kernel: what both products make never leaves the chip.

Each program takes tile after tile; a tile's two products share what was read of x.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

LEAST_ROWS = 1024
"""Fewer rows do not fill a GPU with tiles of this size; a library's products do better there."""

_ROWS, _COLUMNS, _DEPTH = 128, 128, 64  # of a tile
_TOGETHER = 8  # rows of tiles that are worked on side by side, for the cache


@triton.jit(do_not_specialize=["M"])  # one compilation for all sizes of batch
def _gated(
    x, gate, up, bias, out, M, F,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    TOGETHER: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    down_tiles, across_tiles = tl.cdiv(M, ROWS), tl.cdiv(F, COLUMNS)
    for tile in tl.range(tl.program_id(0), down_tiles * across_tiles, tl.num_programs(0)):
        band = tile // (TOGETHER * across_tiles)
        height = min(down_tiles - band * TOGETHER, TOGETHER)
        row = (band * TOGETHER + tile % (TOGETHER * across_tiles) % height) * ROWS
        column = tile % (TOGETHER * across_tiles) // height * COLUMNS
        gates = tl.zeros([ROWS, COLUMNS], tl.float32)
        ups = tl.zeros([ROWS, COLUMNS], tl.float32)
        for k in range(0, K, DEPTH):
            some = x.load([row, k])
            gates = tl.dot(some, gate.load([column, k]).T, gates)
            ups = tl.dot(some, up.load([column, k]).T, ups)
        if BIASED:
            c = column + tl.arange(0, COLUMNS)
            gates += tl.load(bias + c, mask=c < F, other=0.0).to(tl.float32)[None, :]
            ups += tl.load(bias + F + c, mask=c < F, other=0.0).to(tl.float32)[None, :]
        out.store([row, column], (gates * tl.sigmoid(gates) * ups).to(out.dtype))


def gated_linear(x_NC: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The inner activations [N, F] of a gated block, of x's dtype.

    Args:
        x_NC: bfloat16 or float16, on a GPU that has a tensor memory accelerator (Hopper and later).
        weight: [2F, C], gate first; F and C are multiples of 8.
        bias: [2F], or none.
    """
    rows, depth = x_NC.shape
    size = weight.shape[0] // 2
    out = torch.empty(rows, size, dtype=x_NC.dtype, device=x_NC.device)
    programs = torch.cuda.get_device_properties(x_NC.device).multi_processor_count
    describe = TensorDescriptor.from_tensor
    _gated[(programs,)](
        describe(x_NC, [_ROWS, _DEPTH]),
        describe(weight[:size], [_COLUMNS, _DEPTH]),
        describe(weight[size:], [_COLUMNS, _DEPTH]),
        bias, describe(out, [_ROWS, _COLUMNS]), rows, size,
        depth, _ROWS, _COLUMNS, _DEPTH, _TOGETHER, bias is not None,
        num_warps=8, num_stages=4,
    )  # fmt: skip
    return out
