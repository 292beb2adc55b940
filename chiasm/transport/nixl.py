"""Rows by NIXL: the sender writes them straight into the memory they were granted, RDMA or not.

What cannot be written goes on the stream: from the start where two sides have no memory in common
that NIXL reaches, and from the first failure on otherwise.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from chiasm.plan import Span
from chiasm.transport.agent import TransferAgent
from chiasm.transport.base import (
    DRAM,
    STREAM,
    Destination,
    Region,
    RowSource,
    Send,
    WriteFailed,
)
from chiasm.transport.grpc import StreamReceiver, StreamSender
from chiasm.transport.landing import Landing
from chiasm.v1 import encoder_pb2

_CONNECT_S = 5.0
_AVOID_S = (1.0, 10.0, 60.0, 300.0)  # a peer that could not be written, the first time and on


def notice_of(fetch_id: bytes, segment: int, seq: int) -> bytes:
    """What the receiver hears of one grant."""
    return struct.pack(">IQ", segment, seq) + fetch_id


class Avoided:
    """Peers that could not be written, for a while. An agent's name begins with its owner's."""

    def __init__(self) -> None:
        self._until: dict[str, tuple[int, float]] = {}  # failures in a row, until when

    def __contains__(self, agent_name: str) -> bool:
        _, until = self._until.get(_owner(agent_name), (0, 0.0))
        return time.monotonic() < until

    def add(self, agent_name: str) -> None:
        """It has failed."""
        now, longest = time.monotonic(), _AVOID_S[-1]
        # Each life of a peer has a name of its own: those of past lives would stay for ever.
        self._until = {o: seen for o, seen in self._until.items() if now - seen[1] < longest}
        failures, _ = self._until.get(_owner(agent_name), (0, 0.0))
        pause = _AVOID_S[min(failures, len(_AVOID_S) - 1)]
        self._until[_owner(agent_name)] = failures + 1, now + pause

    def remove(self, agent_name: str) -> None:
        """It works."""
        self._until.pop(_owner(agent_name), None)


def _owner(agent_name: str) -> str:
    return agent_name.rpartition(".")[0]


class NixlOutbound:
    """Implements `Outbound`.

    Args:
        agent: Has registered the memory that rows are kept in.
        memory_type: Of that memory. Rows go to memory of the same type: host memory to a GPU, or
            back, is slow unless it is staged, and whoever receives stages better.
    """

    def __init__(self, agent: TransferAgent, memory_type: str) -> None:
        self.avoided = Avoided()
        self._agent = agent
        self._memory_type = memory_type

    async def reach(self, peers: Sequence[encoder_pb2.Peer]) -> tuple[str, ...]:
        """See `Outbound.reach`."""
        fitting = [peer for peer in peers if peer.memory_type == self._memory_type]
        if not fitting or any(peer.agent_name in self.avoided for peer in fitting):
            return ()
        for peer in fitting:
            connected = self._agent.connect(peer.agent_name, peer.agent_metadata)
            try:
                await asyncio.wait_for(asyncio.wrap_future(connected), _CONNECT_S)
            except (WriteFailed, TimeoutError):
                self.avoided.add(peer.agent_name)
                return ()
        return (self._memory_type,)

    def open(self, send: Send, fetch_id: bytes, peers: Sequence[encoder_pb2.Peer]) -> NixlSender:
        """See `Outbound.open`."""
        epochs = {peer.agent_name: peer.agent_epoch for peer in peers}
        return NixlSender(self._agent, StreamSender(send), fetch_id, epochs, self.avoided)


class NixlSender:
    """Implements `Sender`.

    Args:
        agent: Writes.
        stream: For grants that name it.
        fetch_id: Part of every notification.
        epochs: The agents that may be written to, with their lives.
        avoided: Learns of failures.
    """

    def __init__(
        self,
        agent: TransferAgent,
        stream: StreamSender,
        fetch_id: bytes,
        epochs: dict[str, int],
        avoided: Avoided,
    ) -> None:
        self._agent = agent
        self._stream = stream
        self._fetch_id = fetch_id
        self._epochs = epochs
        self._avoided = avoided

    def write(
        self,
        segment: int,
        *,
        seq: int,
        rows: Span,
        source: RowSource,
        destinations: Sequence[Destination],
    ) -> Coroutine[Any, Any, int] | asyncio.Future[int]:
        """See `Sender.write`: begun when this returns, not when other tasks have had their turn.

        NIXL, or the link below it, sees to the bytes being right: no CRC.
        """
        if destinations[0].memory_type == STREAM:
            return self._stream.write(
                segment, seq=seq, rows=rows, source=source, destinations=destinations
            )
        written = _Written(loop=asyncio.get_running_loop())
        try:
            peer = self._peer(destinations)
            if (region := source.region) is None:
                raise WriteFailed("the rows are not in registered memory", aborted=False)
        except WriteFailed as error:
            written.set_exception(error)
            return written
        pieces, target = _pieces(region, rows, destinations)
        over = self._agent.write(peer, pieces, target, notice_of(self._fetch_id, segment, seq))
        written.follow(over)
        written.add_done_callback(partial(self._judge, peer))
        return written

    def _judge(self, peer: str, written: asyncio.Future[int]) -> None:
        if isinstance(written.exception(), WriteFailed):
            self._avoided.add(peer)
        else:
            self._avoided.remove(peer)

    def _peer(self, destinations: Sequence[Destination]) -> str:
        names = {(place.agent_name, place.agent_epoch) for place in destinations}
        name, epoch = names.pop()
        if names or self._epochs.get(name) != epoch:
            raise WriteFailed("no such memory of that peer", aborted=False)
        return name


def _pieces(
    region: Region, rows: Span, destinations: Sequence[Destination]
) -> tuple[list[tuple[Region, int, int]], list[Region]]:
    """Source and target of every destination; neighbours on both sides are one piece."""
    row_bytes = region.length // len(rows)
    pieces: list[tuple[Region, int, int]] = []
    target: list[Region] = []
    for place in destinations:
        offset = (place.rows.begin - rows.begin) * row_bytes
        if pieces:
            _, begin, length = pieces[-1]
            last = target[-1]
            if begin + length == offset and last.address + last.length == place.address:
                pieces[-1] = (region, begin, length + place.length)
                target[-1] = replace(last, length=last.length + place.length)
                continue
        pieces.append((region, offset, place.length))
        target.append(Region(place.address, place.length, place.memory_type, place.device))
    return pieces, target


class _Written(asyncio.Future[int]):
    """The end of a write, which cannot be cancelled: the hardware cannot be called back."""

    def cancel(self, msg: Any = None) -> bool:
        """It goes on."""
        return False

    def follow(self, over: Future[None]) -> None:
        """Ends as that does, which ends in another thread."""
        loop = self.get_loop()

        def ended(over: Future[None]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._end, over.exception())

        over.add_done_callback(ended)

    def _end(self, failure: BaseException | None) -> None:
        if failure is None:
            self.set_result(0)
        else:
            self.set_exception(failure)


@dataclass(frozen=True, slots=True)
class _Granted:
    landing: Landing
    generation: int
    notice: bytes
    segment: int
    destinations: Sequence[Destination]


class NixlReceiver:
    """Implements `Receiver`: lands rows in memory that it offers, or from the stream.

    Args:
        fetch_id: Part of every notification.
        landings: Memory to offer.
        stream: Lands what comes on the stream.
        inline_bytes: Smaller grants of host memory are asked for on the stream: between processes
            a few messages cost less than two threads that are woken and poll.
    """

    def __init__(
        self,
        fetch_id: bytes,
        landings: Sequence[Landing],
        stream: StreamReceiver,
        *,
        inline_bytes: int = 0,
    ) -> None:
        self.on_arrived: Callable[[int, int], None] = lambda seq, bank: None
        self._fetch_id = fetch_id
        self._stream = stream
        self._inline_bytes = inline_bytes
        # As offered: what the sender knows of each is its agent of now.
        self._offers = [(bank, peer) for bank in landings if (peer := bank.peer) is not None]
        self._chosen: tuple[Landing, encoder_pb2.Peer] | None = None
        self._granted: dict[int, _Granted] = {}  # by seq

    @property
    def one_sided(self) -> bool:
        """See `Receiver.one_sided`."""
        return bool(self._granted)

    @property
    def num_dropped(self) -> int:
        """See `Receiver.num_dropped`."""
        return self._stream.num_dropped

    @property
    def memory_type(self) -> str:
        """What the next grant goes to."""
        landing = self._landing()
        return STREAM if landing is None else landing[1].memory_type

    def peers(self) -> Sequence[encoder_pb2.Peer]:
        """See `Receiver.peers`."""
        return [peer for _, peer in self._offers]

    def accepted(self, memory_types: Sequence[str]) -> None:
        """See `Receiver.accepted`."""
        by_type = {peer.memory_type: (landing, peer) for landing, peer in self._offers}
        self._chosen = next((by_type[kind] for kind in memory_types if kind in by_type), None)

    def expect(
        self, segment: int, seq: int, destinations: Sequence[Destination]
    ) -> Sequence[Destination]:
        """See `Receiver.expect`."""
        chosen = self._landing()
        if chosen is None or self._is_small(chosen[0].region, destinations):
            return self._stream.expect(segment, seq, destinations)
        landing, peer = chosen
        notice = notice_of(self._fetch_id, segment, seq)
        landing.arrivals.expect(notice, partial(self._heard, seq))
        generation = landing.generation
        self._granted[seq] = _Granted(landing, generation, notice, segment, destinations)
        region = landing.region
        return [
            replace(
                place,
                address=region.address + place.address,
                memory_type=region.memory_type,
                device=region.device,
                rank=peer.rank,
                agent_name=peer.agent_name,
                agent_epoch=peer.agent_epoch,
            )
            for place in destinations
        ]

    def chunk(self, segment: int, offset: int, data: bytes) -> None:
        """See `Receiver.chunk`."""
        self._stream.chunk(segment, offset, data)

    async def unwritten(self, segment: int, seq: int, *, aborted: bool) -> Sequence[Destination]:
        """See `Receiver.unwritten`."""
        self._chosen = None
        grant = self._granted.get(seq)
        if grant is None or grant.segment != segment:
            return ()
        await self._retire(seq, aborted=aborted)
        return grant.destinations

    async def quiet(self, *, aborted: bool) -> None:
        """See `Receiver.quiet`."""
        self._chosen = None
        for seq in tuple(self._granted):
            await self._retire(seq, aborted=aborted)

    async def landed(self, segment: int, seq: int, crc32: int) -> int | None:
        """See `Receiver.landed`."""
        grant = self._granted.get(seq)
        if grant is None:
            return await self._stream.landed(segment, seq, crc32)
        if grant.segment != segment or not await grant.landing.arrivals.wait(grant.notice):
            return None
        self._granted.pop(seq, None)  # unless `_heard` was faster
        return grant.landing.bank

    def _heard(self, seq: int) -> None:
        """The notification of a grant that nobody has given up has come."""
        grant = self._granted.pop(seq, None)
        if grant is not None:
            self.on_arrived(seq, grant.landing.bank)
            grant.landing.arrivals.forget(grant.notice)

    def _landing(self) -> tuple[Landing, encoder_pb2.Peer] | None:
        """The memory agreed on, while its agent is the one that the sender knows."""
        if self._chosen is None or self._chosen[0].generation != self._chosen[1].agent_epoch:
            return None
        return self._chosen

    def _is_small(self, region: Region, destinations: Sequence[Destination]) -> bool:
        nbytes = sum(place.length for place in destinations)
        return region.memory_type == DRAM and nbytes < self._inline_bytes

    async def _retire(self, seq: int, *, aborted: bool) -> None:
        """The grant is known as given until nothing of it can arrive any more."""
        grant = self._granted[seq]
        grant.landing.arrivals.forget(grant.notice)
        if aborted:
            await grant.landing.renew(grant.generation)
        self._granted.pop(seq, None)
