"""The product of a few rows of `chiasm.kernels.gemv`: the weight streams past the tensor cores.

A program takes some rows of the weight and a part of the columns (split-K), so that narrow weights
fill the GPU too; the program of a tile that finishes last adds up the parts, in order.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from chiasm.kernels.gemv import Shape
from chiasm.kernels.launch import ceil_div, overlapping, power_of_two

MOST_PROGRAMS, LARGEST_TILE = 1056, 64 * 64


@functools.cache
def room(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts, and how many of a tile have arrived (zero between calls): one stream at a time."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    assert not capturing, "run once before a graph is captured"
    parts = torch.empty(MOST_PROGRAMS * LARGEST_TILE, dtype=torch.float32, device=device)
    return parts, torch.zeros(MOST_PROGRAMS, dtype=torch.int32, device=device)


def launch_few_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, shape: Shape
) -> torch.Tensor:
    """See `chiasm.kernels.gemv.linear`."""
    tokens, (outputs, inputs) = x.shape[0], weight.shape
    out = torch.empty((tokens, outputs), dtype=x.dtype, device=x.device)
    parts, arrived = room(x.device)
    tiles = ceil_div(outputs, shape.rows)
    span = ceil_div(ceil_div(inputs, shape.splits), shape.step) * shape.step
    splits = ceil_div(inputs, span)
    assert splits == 1 or tiles * splits <= MOST_PROGRAMS, "more parts than there is room for"
    # fmt: off
    _few_rows[(tiles, splits)](
        x, weight, bias, out, parts, arrived, tokens, outputs, x.stride(0), weight.stride(0),
        inputs=inputs, span=span, splits=splits, has_bias=bias is not None,
        block_tokens=max(power_of_two(tokens), 16), rows=shape.rows, step=shape.step,
        stages=shape.stages, num_warps=shape.warps, **overlapping(x),
    )
    # fmt: on
    return out


@triton.jit(do_not_specialize=["tokens"])
def _few_rows(
    x,
    weight,
    bias,
    out,
    parts,
    arrived,
    tokens,
    outputs,
    x_stride,
    stride,
    inputs: tl.constexpr,
    span: tl.constexpr,
    splits: tl.constexpr,
    has_bias: tl.constexpr,
    block_tokens: tl.constexpr,
    rows: tl.constexpr,
    step: tl.constexpr,
    stages: tl.constexpr,
    early: tl.constexpr,
):
    """Output transposed: rows of the weight are the tall side of the tensor cores' product."""
    tile, split = tl.program_id(0), tl.program_id(1)
    row = tile * rows + tl.arange(0, rows)
    token = tl.arange(0, block_tokens)
    column = tl.arange(0, step)
    begin = split * span
    source = weight + tl.minimum(row, outputs - 1).to(tl.int64)[:, None] * stride
    given = x + token[:, None] * x_stride + column[None, :]
    real = (token < tokens)[:, None]
    if early:
        lines = begin + tl.arange(0, 2 * step // 64) * 64  # of 128 bytes
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [source + tl.minimum(lines, inputs - 1)[None, :]],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        gdc_launch_dependents()
        gdc_wait()
    source += column[None, :]
    total = tl.zeros((rows, block_tokens), tl.float32)
    for start in tl.range(begin, tl.minimum(begin + span, inputs), step, num_stages=stages):
        if inputs % step == 0:
            w = tl.load(source + start)
            g = tl.load(given + start, mask=real, other=0.0)
        else:
            inside = (start + column < inputs)[None, :]
            w = tl.load(source + start, mask=inside, other=0.0)
            g = tl.load(given + start, mask=real & inside, other=0.0)
        total = tl.dot(w, tl.trans(g), total)
    mine = True
    if splits > 1:
        lane = tl.arange(0, rows)[:, None] * block_tokens + token[None, :]
        part = parts + tile * splits * rows * block_tokens
        tl.store(part + split * rows * block_tokens + lane, total)
        tl.debug_barrier()
        mine = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits - 1
        if mine:
            tl.store(arrived + tile, 0)
            total = tl.zeros((rows, block_tokens), tl.float32)
            for number in tl.static_range(splits):
                total += tl.load(part + number * rows * block_tokens + lane, cache_modifier=".cg")
    if mine:
        if has_bias:
            total += tl.load(bias + row, mask=row < outputs, other=0.0).to(tl.float32)[:, None]
        target = out + token[None, :] * outputs + row[:, None]
        known = (row < outputs)[:, None] & (token < tokens)[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=known)
