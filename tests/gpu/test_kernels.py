"""The kernels on a GPU: against float32, in CUDA graphs whose inputs change, and over views."""

from __future__ import annotations

import pytest
import torch

from chiasm.kernels.activation import silu_and_mul
from chiasm.kernels.argmax import greedy, greedy_reference
from chiasm.kernels.block_scaled import FP8, LARGEST, block_scaled_linear, multiply_out, round_rows
from chiasm.kernels.draw import Filters, draw_reference, draw_tokens
from chiasm.kernels.gemv import few_shape_for, linear
from chiasm.kernels.norm import add_rms_norm
from chiasm.kernels.paged_decode import Lookup, Workspace, paged_decode, paged_decode_reference
from chiasm.kernels.rotary import rotate_and_store, rotate_and_store_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PAGE = 16


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def error(out: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((out.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("heads, kv_heads, dim", [(28, 4, 128), (14, 2, 128), (16, 16, 64)])
def test_attention_in_a_graph_whose_lengths_change(heads, kv_heads, dim) -> None:
    torch.manual_seed(heads)
    batch, width = 37, 40
    keys, values = rand(2, batch * width, PAGE, kv_heads, dim)
    tables = torch.randperm(batch * width, device="cuda").view(batch, width).int()
    lookup = Lookup(
        tables,
        torch.arange(batch, device="cuda", dtype=torch.int32),
        torch.ones(batch, device="cuda", dtype=torch.int32),
    )
    room = Workspace.allocate(batch, heads, dim, keys.device, kv_heads)
    queries = rand(batch, heads, dim)
    run = lambda: paged_decode(queries, keys, values, lookup, dim**-0.5, room)  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for most in (1, 17, 90, width * PAGE):
        lookup.lengths.copy_(torch.randint(0, most + 1, (batch,)))
        lookup.seats.copy_(torch.randperm(batch))
        queries.normal_()
        out.fill_(torch.nan)
        graph.replay()
        real = lookup.lengths.nonzero()[:, 0]
        wanted = paged_decode_reference(queries.float(), keys, values, lookup, dim**-0.5)
        assert len(real) == 0 or error(out[real], wanted[real]) < 6e-3
        assert not room.arrived.any()


@pytest.mark.parametrize("rows", [1, 2, 7, 33, 64, 65])
@pytest.mark.parametrize("outputs, inputs", [(4608, 3584), (3584, 18944), (1000, 1100)])
def test_linear(rows, outputs, inputs) -> None:
    torch.manual_seed(rows)
    x, weight, bias = rand(rows, inputs), rand(outputs, inputs) * inputs**-0.5, rand(outputs)
    wanted = x.float() @ weight.float().t() + bias
    assert error(linear(x, weight, bias), wanted) < 4e-3


@pytest.mark.parametrize("rows", [2, 7, 33, 64])
@pytest.mark.parametrize("outputs, inputs", [(4608, 3584), (37888, 3584), (1000, 1100)])
def test_few_rows(rows, outputs, inputs) -> None:
    from chiasm.kernels.few_rows_triton import launch_few_rows, room

    torch.manual_seed(rows)
    x, weight, bias = rand(rows, inputs), rand(outputs, inputs) * inputs**-0.5, rand(outputs)
    wanted = x.float() @ weight.float().t() + bias
    shape = few_shape_for(outputs, inputs)
    results = [launch_few_rows(x, weight, bias, shape) for _ in range(3)]
    assert error(results[0], wanted) < 4e-3
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert not room(x.device)[1].any()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rows, rot", [(1, 128), (300, 64), (1001, 128)])
def test_rotary(rows, rot, interleaved) -> None:
    heads, kv_heads, dim, pages = 14, 2, 128, 80
    qkv, angle = rand(rows, (heads + 2 * kv_heads) * dim), torch.rand(rows, rot // 2).cuda()
    slots = torch.randperm(pages * PAGE, device="cuda")[:rows]
    slots[::7] = -1
    pools = torch.zeros(2, pages, PAGE, kv_heads, dim, device="cuda", dtype=torch.bfloat16)
    wide = pools.float()
    rest = (slots, interleaved)
    out = rotate_and_store(qkv, angle.cos(), angle.sin(), *pools, *rest)
    wanted = rotate_and_store_reference(qkv.float(), angle.cos(), angle.sin(), *wide, *rest)
    assert error(out, wanted) < 4e-3
    if rows > 1:
        assert error(pools, wide) < 4e-3
    assert torch.equal(pools == 0, wide == 0)


def test_one_kernel_after_another_sees_what_it_wrote() -> None:
    """Kernels start before those in front of them end; a long chain finds a missing wait."""
    torch.manual_seed(3)
    weight, gain = rand(2048, 2048) / 45, torch.ones(2048, device="cuda", dtype=torch.bfloat16)
    chain = torch.cuda.CUDAGraph()
    start = rand(1, 2048)
    state = start.clone()

    def run() -> None:
        for _ in range(50):
            _, normed = add_rms_norm(state, linear(state, weight), gain, 1e-6)
            state.copy_(normed)
            state.copy_(linear(silu_and_mul(torch.cat((state, normed), dim=1)), weight))

    run()
    with torch.cuda.graph(chain):
        run()
    results = []
    for _ in range(20):
        state.copy_(start)
        chain.replay()
        results.append(state.clone())
    assert all(torch.equal(results[0], other) for other in results)


@pytest.mark.parametrize("rows", [1, 300])
def test_greedy(rows) -> None:
    logits, masked = rand(rows, 152064), torch.tensor([5, 151655], device="cuda")
    logits[:, 5] = 100.0
    found, wanted = greedy(logits, masked), greedy_reference(logits, masked)
    assert all(map(torch.equal, found, wanted))
    logits[0, 77] = torch.nan
    sound = greedy(logits, masked)[2]
    assert not sound[0] and sound[1:].all()


@pytest.mark.parametrize("rows", [1, 16, 20, 200, 1000])
@pytest.mark.parametrize("outputs, inputs", [(6144, 4096), (4096, 12288), (27392, 4096)])
def test_products_of_eight_bits(rows, outputs, inputs) -> None:
    torch.manual_seed(rows)
    x, bias = rand(rows, inputs), rand(outputs)
    weight = (torch.rand(outputs, inputs, device="cuda") * 2 - 1).mul(LARGEST).to(FP8)
    scales = torch.rand(outputs // 128, inputs // 128, device="cuda").add(0.1) / LARGEST
    values, row_scales = round_rows(x)
    on_host = round_rows(x.cpu())
    assert torch.equal(row_scales.cpu(), on_host.scales)
    differ = (values.cpu().view(torch.uint8) != on_host.values.view(torch.uint8)).float().mean()
    assert differ < 1e-3  # a division that ends between two values
    wide = values.float() * row_scales.repeat_interleave(128, 1)
    wanted = wide.double() @ multiply_out(weight, scales).double().t() + bias.double()
    assert error(block_scaled_linear(x, weight, scales, bias), wanted) < 4e-3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = block_scaled_linear(x, weight, scales, bias)
    other = rand(rows, inputs)
    x.copy_(other)
    graph.replay()
    assert torch.equal(out, block_scaled_linear(other, weight, scales, bias))


@pytest.mark.parametrize("width", [700, 152064])
def test_random_draws(width) -> None:
    """As in float64, but where the random number lies next to the edge between two ids."""
    torch.manual_seed(width)
    settings = [(k, p, m) for k in (0, 1, 40) for p in (1.0, 0.3, 0.95) for m in (0.0, 0.02)]
    rows = [(0.5 + i / 20, *row) for i, row in enumerate(settings * 4)]
    filters = Filters(*torch.tensor(rows, dtype=torch.float64).t().contiguous().cuda())
    logits = (rand(len(rows), width) * 4).float()  # of few different values: many ties
    logits[:, 30:60] = -torch.inf
    numbers = torch.rand(len(rows), dtype=torch.float64).cuda()
    found = draw_tokens(logits, filters, numbers)
    assert torch.equal(found, draw_tokens(logits, filters, numbers))
    same = found == draw_reference(logits, filters, numbers)
    assert same.float().mean() > 0.95, rows
    assert same[[row[1] == 1 for row in rows]].all()
    logits[3] = torch.nan
    logits[4] = -torch.inf
    assert ((draw_tokens(logits, filters, numbers) - width // 2).abs() <= width // 2).all()
