"""Rows in registered memory: where they lie, that they stay whole, that places come back."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from chiasm.transport import DRAM
from encoder_svc.arena import FreeSpace, RowArena, keep_apart

CPU = torch.device("cpu")


def test_rows_lie_where_they_say() -> None:
    arena = RowArena(1 << 16, CPU)
    rows = torch.randn(7, 12)
    kept = arena.keep(rows)
    rows_before = rows.clone()
    rows.zero_()
    assert (kept.num_rows, kept.nbytes) == (7, 7 * 48)
    assert kept.region is not None and kept.region.memory_type == DRAM
    assert arena.region.address <= kept.region.address
    assert kept.region.address + kept.region.length <= arena.region.address + arena.region.length
    found = torch.frombuffer(bytearray(kept.read(2, 5)), dtype=torch.float32).view(3, 12)
    assert torch.equal(found, rows_before[2:5])


def test_what_finds_no_place_is_kept_elsewhere() -> None:
    arena = RowArena(4096, CPU)
    first = arena.keep(torch.ones(1, 900))
    second = arena.keep(torch.ones(1, 900))
    assert first.region is not None and second.region is None
    assert bytes(second.read(0, 1)) == bytes(first.read(0, 1))
    del first
    gc.collect()
    assert arena.num_free == 4096
    assert arena.keep(torch.ones(1, 900)).region is not None


def test_rows_apart_own_their_memory() -> None:
    rows = torch.ones(2, 3)
    kept = keep_apart(rows)
    rows.zero_()
    assert kept.region is None
    assert bytes(kept.read(1, 2)) == torch.ones(3).numpy().tobytes()


@pytest.mark.parametrize("seed", range(20))
def test_places_never_overlap_and_all_come_back(seed: int) -> None:
    draw = random.Random(seed)
    space = FreeSpace(1 << 16)
    held: dict[int, int] = {}
    for _ in range(300):
        if held and draw.random() < 0.5:
            offset = draw.choice(list(held))
            space.give_back(offset, held.pop(offset))
        else:
            nbytes = draw.randint(1, 1 << 13)
            offset = space.take(nbytes)
            if offset is not None:
                assert all(offset + nbytes <= o or o + n <= offset for o, n in held.items())
                held[offset] = nbytes
        space.check()
    for offset, nbytes in held.items():
        space.give_back(offset, nbytes)
    space.check()
    assert space.num_free == 1 << 16
    assert space.take(1 << 16) == 0
