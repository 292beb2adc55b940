"""Greedy sampling against a loop over ids."""

from __future__ import annotations

import pytest
import torch

from chiasm.kernels.argmax import greedy, greedy_reference

BOTH = pytest.mark.parametrize("function", [greedy, greedy_reference])
# Triton's interpreter on NumPy 1.25 and later.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
NONE = torch.zeros(0, dtype=torch.int64)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch, vocabulary", [(1, 7), (3, 5000), (0, 9)])
@pytest.mark.parametrize("masked", [[], [2, 6]])
def test_the_largest_allowed_id_wins(function, dtype, batch, vocabulary, masked) -> None:
    torch.manual_seed(vocabulary)
    logits = torch.randn(batch, vocabulary).to(dtype)  # bfloat16 has ties among 5,000
    before = logits.clone()
    ids, largest, sound = function(logits, torch.tensor(masked, dtype=torch.int64))
    assert ids.dtype == torch.int64 and largest.dtype == torch.float32 and sound.dtype == torch.bool
    for row in range(batch):
        values = logits[row].tolist()
        allowed = [i for i in range(vocabulary) if i not in masked]
        best = max(allowed, key=lambda i: (values[i], -i))
        assert int(ids[row]) == best and float(largest[row]) == values[best]
    assert sound.all() and torch.equal(logits, before)


@BOTH
def test_the_smallest_id_wins_a_tie(function) -> None:
    logits = torch.zeros(2, 9000)
    logits[1, [8999, 4097, 4096]] = 3.0
    assert function(logits, NONE)[0].tolist() == [0, 4096]
    assert function(logits, torch.tensor([0, 4096]))[0].tolist() == [1, 4097]


@BOTH
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_row_is_told_apart(function, value) -> None:
    logits = torch.randn(3, 6000)
    logits[1, 5000] = value
    ids, _, sound = function(logits, torch.tensor([5000]))
    assert sound.tolist() == [True, False, True]
    assert ((ids >= 0) & (ids < 6000)).all()


@BOTH
def test_all_ids_masked(function) -> None:
    ids, largest, sound = function(torch.randn(1, 3), torch.arange(3))
    assert (ids.item(), largest.item(), sound.item()) == (0, -torch.inf, True)


@BOTH
def test_rows_of_a_wider_tensor(function) -> None:
    wide = torch.zeros(3, 64)
    wide[:, 63] = 9.0
    wide[torch.arange(3), torch.tensor([4, 5, 6])] = 1.0
    assert function(wide[:, :50], NONE)[0].tolist() == [4, 5, 6]
