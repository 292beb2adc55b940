"""Paged decoding attention against float64, over ragged lengths and shuffled pages.

In float16, as Triton's interpreter multiplies no bfloat16 matrices.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from chiasm.kernels.paged_decode import (
    Lookup,
    Shape,
    Workspace,
    paged_decode,
    paged_decode_reference,
)

# Triton's interpreter on NumPy 1.25 and later.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
PAGE = 16


class Case:
    """A pool with the pages of several seats in random order."""

    def __init__(self, lengths: list[int], heads: int = 14, kv_heads: int = 2, dim: int = 32):
        torch.manual_seed(sum(lengths))
        self.lengths = lengths
        width = max(-(-max(lengths, default=1) // PAGE), 1)
        seats = len(lengths) + 2
        pages = torch.randperm(seats * width + 3)
        self.tables = pages[: seats * width].view(seats, width).to(torch.int32)
        self.keys, self.values = torch.randn(2, len(pages), PAGE, kv_heads, dim).half()
        self.queries = torch.randn(len(lengths), heads, dim).half()
        self.seats = torch.randperm(seats)[: len(lengths)].to(torch.int32)
        self.workspace = Workspace.allocate(len(lengths), heads, dim, torch.device("cpu"), kv_heads)
        self.scale = dim**-0.5

    def lookup(self) -> Lookup:
        return Lookup(self.tables, self.seats, torch.tensor(self.lengths, dtype=torch.int32))

    def run(self, shape: Shape | None = None) -> torch.Tensor:
        pools = (self.keys, self.values)
        workspace = replace(self.workspace, shape=shape)
        wide = torch.full((len(self.queries) + 3, *self.queries.shape[1:]), 7.0).half()
        out = wide[: len(self.queries)]
        found = paged_decode(self.queries, *pools, self.lookup(), self.scale, workspace, out)
        assert found.data_ptr() == wide.data_ptr() and bool((wide[len(self.queries) :] == 7).all())
        return found

    def check(self, out: torch.Tensor) -> None:
        group = self.queries.shape[1] // self.keys.shape[2]
        for row, length in enumerate(self.lengths):
            table = self.tables[self.seats[row].long()].long()
            for head in range(self.queries.shape[1]) if length else ():
                keys = self.keys[table, :, head // group].flatten(0, 1)[:length].double()
                values = self.values[table, :, head // group].flatten(0, 1)[:length].double()
                weights = (keys @ self.queries[row, head].double() * self.scale).softmax(0)
                error = (out[row, head].double() - weights @ values).norm()
                assert error < 1e-2 * (weights @ values).norm() + 1e-3


SHAPES = [
    None,
    Shape(tile=16, programs=2, stages=2, warps=4),  # few programs: each takes several sequences
    Shape(tile=32, programs=14, stages=2, warps=4),  # cuts inside sequences
    Shape(tile=64, programs=64, stages=2, warps=4),  # more programs than tiles
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lengths", [[1], [200], [0, 17, 16, 129, 0, 64, 1], [33, 300, 5, 0]])
def test_against_float64(lengths, shape) -> None:
    case = Case(lengths)
    case.check(case.run(shape))
    assert not case.workspace.arrived.any()


@pytest.mark.parametrize("lengths", [[1], [0, 17, 40]])
def test_the_torch_version(lengths) -> None:
    case = Case(lengths)
    pools = (case.keys, case.values)
    case.check(paged_decode_reference(case.queries, *pools, case.lookup(), case.scale))


@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 4, 16), (20, 1, 24), (3, 1, 64)])
def test_other_heads(heads, kv_heads, dim) -> None:
    case = Case([50, 0, 7], heads, kv_heads, dim)
    case.check(case.run(Shape(tile=16, programs=8, stages=2, warps=4)))


def test_a_workspace_serves_one_batch_after_another() -> None:
    first, second = Case([300, 20]), Case([40, 41, 300])
    second.workspace = first.workspace = Workspace.allocate(3, 14, 32, torch.device("cpu"), 2)
    for case in (first, second, first):
        case.check(case.run(SHAPES[2]))


def test_other_tokens_of_the_pages_are_not_looked_at() -> None:
    case = Case([20, 5])
    case.keys[case.tables[case.seats[0].long(), 1].long(), 4:] = torch.nan
    case.values[case.tables[case.seats[0].long(), 1].long(), 4:] = torch.nan
    case.check(case.run())


def test_queries_and_pools_may_be_views() -> None:
    case = Case([20, 70])
    wide = torch.randn(2, 20, 32).half()
    wide[:, :14] = case.queries
    case.queries = wide[:, :14]
    case.keys = case.keys.transpose(1, 2).contiguous().transpose(1, 2)
    case.check(case.run(SHAPES[1]))
