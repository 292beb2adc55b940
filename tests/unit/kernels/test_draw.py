"""Random draws: what filters leave, ties at their edges, and that shares are as they should be."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from chiasm.kernels.draw import Filters, draw_reference, draw_tokens

# Triton's interpreter on NumPy 1.25 and later.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]
BOTH = pytest.mark.parametrize("function", [draw_tokens, draw_reference])


def filters(*rows: tuple[float, int, float, float]) -> Filters:
    return Filters(*torch.tensor(rows, dtype=torch.float64).t().contiguous())


def every_share(function, logits: torch.Tensor, row: tuple[float, int, float, float]) -> np.ndarray:
    """How often each id is drawn by random numbers that are evenly spread."""
    count = 400
    numbers = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    found = function(logits.repeat(count, 1), filters(*[row] * count), numbers)
    assert bool((found.diff() >= 0).all()), "the distribution is not inverted in the order of ids"
    return np.bincount(found.numpy(), minlength=logits.shape[1]) / count


@BOTH
@pytest.mark.parametrize(
    "row, kept",
    [
        ((1.0, 0, 1.0, 0.0), [0, 1, 2, 3, 4]),
        ((1.0, 1, 1.0, 0.0), [1]),
        ((1.0, 2, 1.0, 0.0), [1, 2]),  # 2 and 4 are equally likely: the smaller id stays
        ((1.0, 3, 1.0, 0.0), [1, 2, 4]),
        ((1.0, 9, 1.0, 0.0), [0, 1, 2, 3, 4]),
        ((1.0, 0, 0.35, 0.0), [1]),
        ((1.0, 0, 0.45, 0.0), [1, 2]),
        ((1.0, 0, 0.7, 0.0), [1, 2, 4]),
        ((1.0, 0, 0.91, 0.0), [1, 2, 3, 4]),
        ((1.0, 2, 0.6, 0.0), [1]),  # 0.4 of the 0.65 that top-k has left
        ((1.0, 0, 1.0, 0.6), [1, 2, 4]),
        ((1.0, 0, 1.0, 1.0), [1]),
        ((2.0, 4, 0.9, 0.4), [1, 2, 3, 4]),
    ],
)
def test_what_stays_and_how_often(function, row, kept) -> None:
    shares = torch.tensor([0.05, 0.4, 0.25, 0.05, 0.25])
    if row[0] != 1.0 or row[2] == 0.91:
        shares = torch.tensor([0.02, 0.4, 0.25, 0.08, 0.25])
    logits = shares.log()[None]
    heated = shares.double() ** (1 / row[0])
    wanted = np.zeros(5)
    wanted[kept] = heated[kept] / heated[kept].sum()
    assert np.abs(every_share(function, logits, row) - wanted).max() < 0.005


@BOTH
def test_long_rows_with_many_ties_and_ids_that_are_out(function) -> None:
    """More than one block of ids; bfloat16 leaves few different numbers."""
    torch.manual_seed(2)
    logits = (torch.randn(6, 20000) * 3).bfloat16().float()
    logits[:, 5000:9000] = -torch.inf
    numbers = torch.rand(6, dtype=torch.float64)
    wanted = filters(*[(0.7, k, p, m) for k in (0, 50) for p, m in ((1, 0), (0.8, 0), (1, 0.02))])
    before = logits.clone()
    found = function(logits, wanted, numbers)
    expected = draw_reference(logits, wanted, numbers)
    near = (found - expected).abs() <= 3  # next to the random number, rounding may tell
    assert bool((near | (found == expected)).all()) and torch.equal(before, logits)
    assert bool((logits.gather(1, found[:, None]) > -torch.inf).all())


@BOTH
def test_rows_that_are_no_numbers_get_an_id_in_range(function) -> None:
    logits = torch.zeros(3, 100)
    logits[0] = torch.nan
    logits[1] = -torch.inf
    logits[2, 7] = torch.inf
    found = function(
        logits, filters(*[(1.0, 3, 0.5, 0.1)] * 3), torch.tensor([0.1, 0.5, 0.9]).double()
    )
    assert bool(((found >= 0) & (found < 100)).all())
