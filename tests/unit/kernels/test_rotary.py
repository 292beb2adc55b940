"""Rotation and paged writes against a loop over heads in float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from chiasm.kernels.rotary import rotate_and_store, rotate_and_store_reference

PAGE = 16


def turned(head: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool):
    """One head's [dim] in float64, pair by pair."""
    out, half = head.double().clone(), len(cos)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        x, y = head[a].double(), head[b].double()
        out[a] = x * cos[i].double() - y * sin[i].double()
        out[b] = y * cos[i].double() + x * sin[i].double()
    return out


@pytest.mark.parametrize("function", [rotate_and_store, rotate_and_store_reference])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim, rot", [(32, 32), (32, 16), (24, 12)])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_rotates_and_stores(function, interleaved, dim, rot, slot_dtype) -> None:
    torch.manual_seed(dim + rot)
    heads, kv_heads, tokens, dtype = 7, 2, 4, torch.bfloat16
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    angle = torch.rand(tokens, rot // 2) * 6
    cos, sin = angle.cos(), angle.sin()
    keys, values = torch.full((2, 3, PAGE, kv_heads, dim), 9.0, dtype=dtype)
    slots = torch.tensor([PAGE + 3, -1, 0, 3 * PAGE - 1], dtype=slot_dtype)
    before = qkv.clone()
    queries = function(qkv, cos, sin, keys, values, slots, interleaved)
    assert torch.equal(qkv, before)
    parts = qkv.view(tokens, -1, dim)
    written = set()
    for t, h in product(range(tokens), range(heads)):
        wanted = turned(parts[t, h], cos[t], sin[t], interleaved)
        torch.testing.assert_close(queries[t, h].double(), wanted, rtol=8e-3, atol=8e-3)
        assert torch.equal(queries[t, h, rot:], parts[t, h, rot:])
    for t, h in product((0, 2, 3), range(kv_heads)):
        page, place = divmod(int(slots[t]), PAGE)
        written.add((page, place))
        wanted = turned(parts[t, heads + h], cos[t], sin[t], interleaved)
        torch.testing.assert_close(keys[page, place, h].double(), wanted, rtol=8e-3, atol=8e-3)
        assert torch.equal(values[page, place, h], parts[t, heads + kv_heads + h])
    for page, place in set(product(range(3), range(PAGE))) - written:
        assert (keys[page, place] == 9).all() and (values[page, place] == 9).all()


@pytest.mark.parametrize("function", [rotate_and_store, rotate_and_store_reference])
def test_pools_may_have_heads_before_places(function) -> None:
    torch.manual_seed(0)
    qkv, slots = torch.randn(2, 6 * 16), torch.tensor([5, 17])
    cos, sin = torch.rand(2, 2, 8)
    plain = torch.zeros(2, 2, PAGE, 2, 16)
    swapped = torch.zeros(2, 2, 2, PAGE, 16).transpose(2, 3)
    first = function(qkv, cos, sin, plain[0], plain[1], slots)
    second = function(qkv, cos, sin, swapped[0], swapped[1], slots)
    assert torch.equal(first, second)
    assert torch.equal(plain, swapped) and plain.abs().sum() > 0


def test_no_tokens() -> None:
    pool = torch.zeros(1, PAGE, 1, 8)
    empty = torch.zeros(0, 4)
    slots = torch.zeros(0, dtype=torch.int64)
    assert rotate_and_store(torch.zeros(0, 32), empty, empty, pool, pool, slots).shape == (0, 2, 8)


@pytest.mark.parametrize("tokens", [511, 513])
def test_many_tokens(tokens) -> None:
    torch.manual_seed(tokens)
    qkv, slots = torch.randn(tokens, 3 * 8), torch.randperm(tokens)
    slots[::5] = -1
    cos, sin = torch.rand(2, tokens, 4)
    pools, wanted = torch.zeros(2, 2, tokens // PAGE + 1, PAGE, 1, 8)
    out = rotate_and_store(qkv, cos, sin, *pools, slots)
    expected = rotate_and_store_reference(qkv, cos, sin, *wanted, slots)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(pools, wanted)
