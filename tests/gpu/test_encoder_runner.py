"""The tower on a GPU: rows near those of the CPU, and read back byte for byte while it works on."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from chiasm.checkpoint import resolve_model
from chiasm.plan import Grid
from encoder_svc.graphs import GraphedTower
from encoder_svc.runner import NON_FINITE, TowerRunner
from encoder_svc.work import PreparedUnit, RunFailure

pytestmark = pytest.mark.gpu
GRIDS = [Grid(1, 16, 16), Grid(3, 6, 10), Grid(1, 36, 90), Grid(1, 2, 2)]


def units() -> list[PreparedUnit]:
    rng = np.random.default_rng(0)
    return [
        PreparedUnit(rng.standard_normal((grid.patches, 1176)).astype(np.float32), grid)
        for grid in GRIDS
    ]


def rows(runner: TowerRunner, batch: list[PreparedUnit]) -> list[torch.Tensor]:
    dtype = getattr(torch, runner.row_format.dtype)
    found = []
    for outcome in runner.run(batch, segment_rows=100):
        assert not isinstance(outcome, RunFailure)
        parts = [torch.frombuffer(b.read(0, b.num_rows), dtype=dtype) for b in outcome]
        found.append(torch.cat(parts).view(-1, runner.row_format.hidden_size).float())
    return found


def load(device: str, dtype: str) -> TowerRunner:
    return TowerRunner.load(resolve_model("demo"), device=device, dtype=dtype, row_dtype="auto")


@pytest.mark.parametrize(
    ("dtype", "cosine"), [("float32", 0.99999), ("bfloat16", 0.999), ("float16", 0.999)]
)
def test_rows_near_the_cpu(dtype: str, cosine: float) -> None:
    batch = units()
    on_gpu = rows(load("cuda", dtype), batch)
    on_cpu = rows(load("cpu", "float32"), batch)
    for ours, expected in zip(on_gpu, on_cpu, strict=True):
        assert torch.cosine_similarity(ours, expected).min() >= cosine


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_unit_alone_has_the_same_bits_every_time(dtype: str) -> None:
    """Whatever ran before it, and on another copy of the tower: why runs of a clip are exact."""
    batch = units()
    runner, other = load("cuda", dtype), load("cuda", dtype)
    first = [rows(runner, [unit])[0] for unit in batch]
    rows(runner, batch)
    for index in (2, 0, 3, 1):
        for tower in (runner, other):
            assert torch.equal(rows(tower, [batch[index]])[0], first[index])


def test_reading_does_not_wait_for_or_see_the_next_forward() -> None:
    runner = load("cuda", "auto")
    batch = units()
    first = runner.run(batch[:1], segment_rows=10)
    assert not isinstance(first[0], RunFailure)
    before = [bytes(buffer.read(0, buffer.num_rows)) for buffer in first[0]]
    for _ in range(3):
        runner.run(batch, segment_rows=10)
    assert [bytes(buffer.read(0, buffer.num_rows)) for buffer in first[0]] == before
    assert bytes(first[0][0].read(2, 5)) == before[0][2 * 256 : 5 * 256]  # 128 x bfloat16


def test_graphs_are_recorded_while_rows_are_read() -> None:
    """Every read takes a stream, of which there are few: none is the one that is recorded."""
    runner = load("cuda", "auto")
    batch = units()
    expected = [rows(runner, [unit])[0] for unit in batch]
    first = runner.run(batch[:1], segment_rows=10)[0]
    assert not isinstance(first, RunFailure)
    done = threading.Event()

    def read() -> int:
        reads = 0
        while not done.is_set():
            first[0].read(0, first[0].num_rows)
            reads += 1
        return reads

    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read) for _ in range(4)]
        try:
            for _ in range(6):  # recorded at the fourth time
                for unit, wanted in zip(batch, expected, strict=True):
                    assert torch.equal(rows(runner, [unit])[0], wanted)
        finally:
            done.set()
        assert sum(reader.result() for reader in readers) > 32
    assert isinstance(runner._forward, GraphedTower)
    assert len(runner._forward._graphs) == len(batch)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_thread_whose_current_gpu_is_another() -> None:
    """The engine's thread never chose a GPU: kernels must go by the tower's all the same."""
    batch = units()
    runner = load("cuda:1", "auto")
    with ThreadPoolExecutor(1) as thread:
        for _ in range(5):  # the last times as a graph
            found = thread.submit(rows, runner, batch).result()
    for ours, expected in zip(found, rows(load("cpu", "float32"), batch), strict=True):
        assert torch.cosine_similarity(ours, expected).min() >= 0.999


def test_non_finite_rows_fail_their_unit_alone() -> None:
    batch = units()
    batch[1].patches[5, 5] = np.nan
    outcomes = load("cuda", "auto").run(batch, segment_rows=100)
    assert [isinstance(outcome, RunFailure) for outcome in outcomes] == [False, True, False, False]
    assert outcomes[1] == RunFailure(NON_FINITE)
