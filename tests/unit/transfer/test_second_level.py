"""What the store has no room for goes on to a second level, and comes back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from chiasm.errors import ResourceExhausted
from encoder_svc.arena import FreeSpace, RowArena, TensorRows, keep_apart
from encoder_svc.messages import RowBuffer
from encoder_svc.pinned import PinnedLevel
from encoder_svc.second_level import SecondLevel
from tests.unit.transfer.test_store import ROW, Bench, Zeros


class Moved(Zeros):
    """Rows in the second level."""


class Keeper:
    """Counts; has room for so many segments."""

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.restored = 0

    def spill(self, buffer: RowBuffer) -> RowBuffer | None:
        assert type(buffer) is Zeros
        self.room -= 1
        return Moved(buffer.num_rows) if self.room >= 0 else None

    def restore(self, buffer: RowBuffer) -> RowBuffer:
        assert type(buffer) is Moved
        self.restored += 1
        return Zeros(buffer.num_rows)


class TwoLevels(Bench):
    def __init__(self, rows: int = 10, second: int = 10, room: int = 100) -> None:
        super().__init__(rows)
        self.keeper = Keeper(room)
        self.second = SecondLevel(second * ROW, self.keeper)
        self.store._second = self.second

    def cached(self, name: str, rows: int = 4) -> None:
        encode_id, _ = self.made(name, rows)
        self.store.end_encode(encode_id)
        self.store.check()

    def asks(self, name: str, rows: int = 4) -> tuple[bool, bytes]:
        encode_id, admission = self.admit(name, rows)
        return admission.cached, encode_id


def test_evicted_rows_are_served_again_without_a_forward() -> None:
    bench = TwoLevels()
    for name in ("a", "b", "c"):
        bench.cached(name)
    assert bench.second.used_bytes == 4 * ROW and bench.store.used_bytes == 8 * ROW
    hit, encode_id = bench.asks("a")
    assert hit and bench.keeper.restored == 1
    entry = bench.store.find(encode_id)
    assert entry is not None and type(entry.segments[0].buffer) is Zeros
    assert bench.second.used_bytes == 4 * ROW, "b made room for a"
    bench.store.end_encode(encode_id)
    bench.store.check()


def test_the_oldest_leave_the_second_level() -> None:
    bench = TwoLevels()
    for name in ("a", "b", "c", "d", "e"):
        bench.cached(name)
    assert bench.second.used_bytes == 8 * ROW  # b and c; d and e are above
    assert bench.asks("b")[0] and not bench.asks("a")[0]


def test_no_room_above_leaves_an_entry_below() -> None:
    bench = TwoLevels()
    bench.cached("a")
    first, second = bench.made("b", 4)[0], bench.made("c", 6)[0]
    with pytest.raises(ResourceExhausted):
        bench.admit("a")
    bench.store.check()
    assert bench.second.used_bytes == 4 * ROW
    bench.store.end_encode(second)
    assert bench.asks("a")[0]
    bench.store.end_encode(first)
    bench.store.check()


def test_what_finds_no_place_below_is_gone() -> None:
    for bench in (TwoLevels(second=3), TwoLevels(room=0)):
        for name in ("a", "b", "c"):
            bench.cached(name)
        assert bench.second.used_bytes == 0
        assert not bench.asks("a")[0]


@pytest.fixture(name="rows", params=["arena", "apart"])
def rows_(request: pytest.FixtureRequest) -> Iterator[tuple[PinnedLevel, TensorRows]]:
    device = torch.device("cpu")
    keep = RowArena(4096, device).keep if request.param == "arena" else keep_apart
    values = torch.randn(6, 40).bfloat16()
    yield PinnedLevel(1024, device, keep), keep(values)


def test_bytes_survive_both_ways(rows: tuple[PinnedLevel, TensorRows]) -> None:
    level, buffer = rows
    expected = bytes(buffer.read(0, 6))
    below = level.spill(buffer)
    assert below is not None and (below.num_rows, below.nbytes) == (6, 480)
    assert below.region is None and bytes(below.read(2, 4)) == expected[160:320]
    above = level.restore(below)
    assert bytes(above.read(0, 6)) == expected
    again = level.spill(above)
    assert again is not None and level.spill(above) is None, "two of 480 bytes fill 1024"


def test_a_dropped_entry_frees_its_place(rows: tuple[PinnedLevel, TensorRows]) -> None:
    level, buffer = rows
    space: FreeSpace = level._space
    below = level.spill(buffer)
    assert space.num_free == 1024 - 512
    del below
    assert space.num_free == 1024
