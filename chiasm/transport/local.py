"""Rows inside one process, written by the sender itself: what RDMA does, without the hardware.

Unlike on a stream, nothing stands between the writer and the memory. That makes it the transport to
test quarantine and fences with.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from chiasm.plan import Span
from chiasm.transport.base import DRAM, HOST_BANK, Destination, RowSource, Send, WriteFailed
from chiasm.v1 import encoder_pb2


class LocalMemory:
    """The memories that local senders can reach, by agent name. Implements `Outbound`."""

    def __init__(self) -> None:
        self._views: dict[str, memoryview] = {}
        self._numbers = itertools.count()

    def register(self, view: memoryview) -> str:
        """Makes memory reachable; returns the name of its agent."""
        name = f"local-{next(self._numbers)}"
        self._views[name] = view
        return name

    async def reach(self, peers: Sequence[encoder_pb2.Peer]) -> tuple[str, ...]:
        """Everybody is reached."""
        return (DRAM,)

    def open(self, send: Send, fetch_id: bytes, peers: Sequence[encoder_pb2.Peer]) -> LocalSender:
        """The writing half of a fetch."""
        names = {peer.agent_name for peer in peers}
        return LocalSender({name: view for name, view in self._views.items() if name in names})


class LocalSender:
    """Implements `Sender`: writes into the memory of the peers it was opened for, and no other."""

    def __init__(self, views: dict[str, memoryview]) -> None:
        self._views = views

    async def write(
        self,
        segment: int,
        *,
        seq: int,
        rows: Span,
        source: RowSource,
        destinations: Sequence[Destination],
    ) -> int:
        """Copies one grant; see `Sender.write`."""
        for place in destinations:
            begin = place.rows.begin - rows.begin
            data = source.read(begin, begin + len(place.rows))
            view = self._views.get(place.agent_name)
            if view is None or place.address + place.length > len(view):
                raise WriteFailed("no such memory of that peer", aborted=False)
            view[place.address : place.address + place.length] = data
            await asyncio.sleep(0)  # other tasks may run between writes, as beside real RDMA
        return 0


class LocalReceiver:
    """Implements `Receiver`.

    Args:
        agent_name: What `LocalMemory.register` returned for the slab.
    """

    one_sided = True
    memory_type = DRAM

    def __init__(self, agent_name: str) -> None:
        self._agent_name = agent_name
        self._expected: dict[int, int] = {}  # seq: segment
        self.num_dropped = 0
        self.on_arrived: Callable[[int, int], None] = lambda seq, bank: None

    def peers(self) -> Sequence[encoder_pb2.Peer]:
        """The one rank there is."""
        return (encoder_pb2.Peer(rank=0, agent_name=self._agent_name, memory_type=DRAM),)

    def accepted(self, memory_types: Sequence[str]) -> None:
        """There is nothing to choose."""

    def expect(
        self, segment: int, seq: int, destinations: Sequence[Destination]
    ) -> Sequence[Destination]:
        """Announces a grant; the peer sees our memory by the agent's name."""
        self._expected[seq] = segment
        return [
            replace(place, memory_type=DRAM, agent_name=self._agent_name) for place in destinations
        ]

    def chunk(self, segment: int, offset: int, data: bytes) -> None:
        """Nothing comes on the stream; what does is dropped."""
        self.num_dropped += 1

    async def unwritten(self, segment: int, seq: int, *, aborted: bool) -> Sequence[Destination]:
        """There is no other way."""
        return ()

    async def quiet(self, *, aborted: bool) -> None:
        """Writes of one process are over when they are over."""

    async def landed(self, segment: int, seq: int, crc32: int) -> int | None:
        """The sender's word is enough: its writes were done before it was given."""
        return HOST_BANK if self._expected.pop(seq, None) == segment else None
