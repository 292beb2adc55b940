"""A linear layer of some dozens to 256 rows: the weight is read once, all processors get as much.

The work is a line of steps: the columns of the first tile of the weight's rows, then those of the
second, and so on. Every program takes a span of that line (stream-K, Osama et al. 2023), so that
no processor waits for a last round of tiles. A tile that several programs share is added up, in
order, by the one that finishes last. A span of a whole tile is the usual product; one that divides
a tile is split-K.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from chiasm.kernels.launch import ceil_div, overlapping, power_of_two

MOST_ROWS = 256
ROOM, MOST_TILES = 16 * 2**20, 8192


@dataclass(frozen=True, slots=True)
class Cut:
    """How the product is cut."""

    rows: int
    """Rows of the weight in a tile."""
    step: int
    """Columns that one step takes."""
    stages: int
    """Steps whose loads are under way at once."""
    warps: int
    programs: int
    """How many share the steps of all tiles; 0: one for each tile."""
    weight_first: bool = True
    """The weight's rows are the tall side of the tensor cores' product, else those of x."""

    def span(self, outputs: int, inputs: int) -> int:
        """Steps of one program."""
        steps, tiles = ceil_div(inputs, self.step), ceil_div(outputs, self.rows)
        return ceil_div(tiles * steps, self.programs) if self.programs else steps


@functools.cache
def room(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts, and how many of a tile have arrived (zero between calls): one stream at a time."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    assert not capturing, "run once before a graph is captured"
    parts = torch.empty(ROOM, dtype=torch.float32, device=device)
    return parts, torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


def launch_mid_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cut: Cut
) -> torch.Tensor:
    """x [T, K], T up to `MOST_ROWS`, times weight [N, K] transposed, plus bias [N], to [T, N].

    Sums in float32. Rows of x and of the weight begin at multiples of 16 bytes. The weight is read
    before the kernel in front has ended, so that one must not be what writes it.
    """
    tokens, (outputs, inputs) = x.shape[0], weight.shape
    out = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device)
    parts, arrived = room(x.device)
    block = max(power_of_two(tokens), 64 if not cut.weight_first else 16)
    tiles, steps = ceil_div(outputs, cut.rows), ceil_div(inputs, cut.step)
    span = cut.span(outputs, inputs)
    programs = ceil_div(tiles * steps, span)
    shared = programs > tiles or span % steps != 0
    assert not shared or (2 * programs * cut.rows * block <= ROOM and tiles <= MOST_TILES)
    # fmt: off
    _mid_rows[(programs,)](
        TensorDescriptor.from_tensor(weight, [cut.rows, cut.step]),
        TensorDescriptor.from_tensor(x, [block, cut.step]),
        weight, bias, out, parts, arrived, tokens, outputs, weight.stride(0), tiles * steps,
        inputs=inputs, span=span, shared=shared, has_bias=bias is not None,
        block_tokens=block, rows=cut.rows, step=cut.step, stages=cut.stages,
        weight_first=cut.weight_first, num_warps=cut.warps, **overlapping(x),
    )
    # fmt: on
    return out


@triton.jit(do_not_specialize=["tokens", "all_steps"])
def _mid_rows(
    weight_tiles,
    x_tiles,
    weight,
    bias,
    out,
    parts,
    arrived,
    tokens,
    outputs,
    stride,
    all_steps,
    inputs: tl.constexpr,
    span: tl.constexpr,
    shared: tl.constexpr,
    has_bias: tl.constexpr,
    block_tokens: tl.constexpr,
    rows: tl.constexpr,
    step: tl.constexpr,
    stages: tl.constexpr,
    weight_first: tl.constexpr,
    early: tl.constexpr,
):
    steps: tl.constexpr = (inputs + step - 1) // step
    size: tl.constexpr = rows * block_tokens
    begin = tl.program_id(0) * span
    end = tl.minimum(begin + span, all_steps)
    tall: tl.constexpr = rows if weight_first else block_tokens
    wide: tl.constexpr = block_tokens if weight_first else rows
    lane = tl.arange(0, tall)[:, None] * wide + tl.arange(0, wide)[None, :]
    if early:
        row = tl.minimum(begin // steps * rows + tl.arange(0, rows), outputs - 1)
        line = begin % steps * step + tl.arange(0, 2 * step // 64) * 64  # of 128 bytes
        line = tl.minimum(line, inputs - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [weight + row.to(tl.int64)[:, None] * stride + line[None, :]],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        gdc_launch_dependents()
        gdc_wait()
    for tile in tl.range(begin // steps, (end + steps - 1) // steps):
        low = tl.maximum(begin, tile * steps)
        high = tl.minimum(end, (tile + 1) * steps)
        total = tl.zeros((tall, wide), tl.float32)
        for number in tl.range(low, high, num_stages=stages):
            column = (number - tile * steps) * step
            w = weight_tiles.load([tile * rows, column])
            g = x_tiles.load([0, column])
            total = tl.dot(w, tl.trans(g), total) if weight_first else tl.dot(g, tl.trans(w), total)
        mine = True
        if shared:  # noqa: SIM102 (when compiled, the other when run)
            if high - low < steps:
                slot = tl.program_id(0) * 2 + (tile > begin // steps)
                tl.store(parts + slot * size + lane, total)
                tl.debug_barrier()
                first = tile * steps // span
                last = ((tile + 1) * steps - 1) // span
                mine = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == last - first
                if mine:
                    tl.store(arrived + tile, 0)
                    total = tl.zeros((tall, wide), tl.float32)
                    for program in tl.range(first, last + 1):
                        slot = program * 2 + (tile > program * span // steps)
                        total += tl.load(parts + slot * size + lane, cache_modifier=".cg")
        if mine:
            row = tile * rows + tl.arange(0, rows)
            token = tl.arange(0, block_tokens)
            known = (token < tokens)[:, None] & (row < outputs)[None, :]
            result = tl.trans(total) if weight_first else total
            if has_bias:
                result += tl.load(bias + row, mask=row < outputs, other=0.0).to(tl.float32)[None, :]
            target = out + token[:, None] * outputs + row[None, :]
            tl.store(target, result.to(out.dtype.element_ty), mask=known)
