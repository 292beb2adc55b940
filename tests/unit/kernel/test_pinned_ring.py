"""What a device has yet to copy is never written over."""

from __future__ import annotations

from collections import deque

import torch
from hypothesis import given
from hypothesis import strategies as st

from chiasm.pinned_ring import PinnedRing


class LateDevice:
    """Copies in order, and not before somebody waits for it."""

    def __init__(self) -> None:
        self._work: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self._done = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._work.append((target, source))

    def ordered(self) -> int:
        return self._done + len(self._work)

    def run_to(self, moment: int) -> None:
        while self._done < moment:
            target, source = self._work.popleft()
            target.copy_(source)
            self._done += 1


class LateMark:
    def __init__(self, device: LateDevice) -> None:
        self._device, self._moment = device, 0

    def record(self) -> None:
        self._moment = self._device.ordered()

    def synchronize(self) -> None:
        self._device.run_to(self._moment)


@given(
    sizes=st.lists(st.integers(1, 700), min_size=1, max_size=60),
    buffers=st.integers(2, 4),
    whole=st.booleans(),
)
def test_everything_arrives(sizes: list[int], buffers: int, whole: bool) -> None:
    device = LateDevice()
    memory = [torch.zeros(256, dtype=torch.uint8) for _ in range(buffers)]
    ring = PinnedRing(memory, lambda: LateMark(device))
    data = torch.randint(0, 256, (sum(sizes),), dtype=torch.uint8)
    arrived = torch.zeros_like(data)
    begin = 0
    for size in sizes:
        end = begin + size
        while begin < end:
            least = min(end - begin, 256) if whole else 1
            buffer, view = ring.piece(end - begin, least=least)
            assert least <= len(view) == buffer.numel() <= end - begin
            view[:] = data[begin : begin + len(view)].numpy().data
            device.copy(arrived[begin : begin + len(view)], buffer)
            begin += len(view)
    device.run_to(device.ordered())
    assert torch.equal(arrived, data)


def test_small_pieces_share_a_buffer() -> None:
    device = LateDevice()
    ring = PinnedRing([torch.zeros(256, dtype=torch.uint8)] * 2, lambda: LateMark(device))
    first, _ = ring.piece(10)
    second, _ = ring.piece(500)
    assert second.data_ptr() - first.data_ptr() == 64  # where a device likes copies to begin
    assert second.numel() == 192
