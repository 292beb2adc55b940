"""How rows move: where they go (`Destination`) and the two halves of a transport.

A `Sender` lives beside the rows, a `Receiver` beside the memory they land in. Both obey decisions
made elsewhere (`encoder_svc.fetch_session`, `decoder_svc.embeddings.receiver`) and make none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from chiasm.plan import Span
from chiasm.v1 import encoder_pb2

STREAM = "stream"
DRAM = "DRAM"
VRAM = "VRAM"

HOST_BANK, RANK_BANK = 0, 1
"""Banks of the slab: memory that all ranks of the host share, and the first rank's own."""


class WriteFailed(Exception):
    """The peer's memory cannot be written; nothing of the grant is being written any more.

    Args:
        message: Why, in one line.
        aborted: It had begun: bytes may still be under way outside of this process.
    """

    def __init__(self, message: str, *, aborted: bool) -> None:
        super().__init__(message)
        self.aborted = aborted


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that a transport has registered."""

    address: int
    length: int
    memory_type: str
    device: int = 0


@dataclass(frozen=True, slots=True)
class Destination:
    """Where some rows go: plain fields, never pickle.

    Args:
        rows: Rows of the item.
        address: First byte; for `stream` an offset in the receiver's slab, opaque to the sender.
        length: Bytes.
        memory_type: stream (on the Fetch stream itself), DRAM or VRAM.
        rank: The receiving rank.
        agent_name: The rank's transfer agent; empty on a stream.
        agent_epoch: The life of that agent.
        device: Device index of VRAM.
    """

    rows: Span
    address: int
    length: int
    memory_type: str = STREAM
    rank: int = 0
    agent_name: str = ""
    agent_epoch: int = 0
    device: int = 0

    def to_proto(self) -> encoder_pb2.Destination:
        """The wire value."""
        return encoder_pb2.Destination(
            rank=self.rank,
            agent_name=self.agent_name,
            agent_epoch=self.agent_epoch,
            memory_type=self.memory_type,
            device=self.device,
            address=self.address,
            length=self.length,
            rows=self.rows.to_proto(),
        )

    @classmethod
    def from_proto(cls, message: encoder_pb2.Destination) -> Destination:
        """Raises ValueError when its rows run backwards."""
        return cls(
            rows=Span.from_proto(message.rows),
            address=message.address,
            length=message.length,
            memory_type=message.memory_type,
            rank=message.rank,
            agent_name=message.agent_name,
            agent_epoch=message.agent_epoch,
            device=message.device,
        )


class RowSource(Protocol):
    """Finished rows of one segment."""

    def read(self, begin: int, end: int) -> memoryview:
        """Host bytes of rows [begin, end), counted from the segment's first row; contiguous."""
        ...

    @property
    def region(self) -> Region | None:
        """Where all rows lie one after another in registered memory; None when they do not."""
        ...


Send = Callable[[encoder_pb2.FetchResponse], Awaitable[None]]
"""Sends a message on the Fetch stream; returns when the stream has taken it (flow control)."""


class Sender(Protocol):
    """The writing half, one per Fetch stream."""

    def write(
        self,
        segment: int,
        *,
        seq: int,
        rows: Span,
        source: RowSource,
        destinations: Sequence[Destination],
    ) -> Coroutine[Any, Any, int] | asyncio.Future[int]:
        """Writes one grant: a coroutine, or the future of a write that has begun already.

        It is over when no byte of the grant will be written any more. Cancelling must keep that
        promise too: it ends only after the last write.

        Args:
            segment: The segment the destinations belong to.
            seq: Number of the grant in its fetch, from 1.
            rows: Rows of the item that `source` holds.
            source: The segment's rows.
            destinations: Slices of `rows`, in order.

        Returns:
            CRC-32 of the bytes in order of the destinations; 0 when the transport checks itself.

        Raises:
            WriteFailed: The peer's memory cannot be written; the stream may do.
        """
        ...


class Outbound(Protocol):
    """The sending process's end: one for all its Fetch streams."""

    async def reach(self, peers: Sequence[encoder_pb2.Peer]) -> tuple[str, ...]:
        """Connects to those who receive; the types of their memory that it can write, best first.

        Empty when rows have to travel on the stream. Never raises, never takes long.
        """
        ...

    def open(self, send: Send, fetch_id: bytes, peers: Sequence[encoder_pb2.Peer]) -> Sender:
        """The writing half for a new Fetch stream."""
        ...


class Receiver(Protocol):
    """The landing half, one per Fetch stream.

    A grant has landed when its bytes are in memory *and* the sender has said so: on the stream, or
    by a notification to the receiving rank, which comes after the last byte. Grants are numbered as
    the sender counts them, from 1.
    """

    on_arrived: Callable[[int, int], None]
    """Called with the number of a grant and the bank it is in when a notification says that it has
    landed. Set by the owner; may be called before the sender's word on the stream, or never."""

    @property
    def memory_type(self) -> str:
        """What the next grant goes to."""
        ...

    @property
    def one_sided(self) -> bool:
        """Whether the peer may be writing into our memory itself: a broken stream needs a fence."""
        ...

    @property
    def num_dropped(self) -> int:
        """Chunks that no grant asked for."""
        ...

    def peers(self) -> Sequence[encoder_pb2.Peer]:
        """The ranks that receive, for `FetchOpen`; empty when rows travel on the stream."""
        ...

    def accepted(self, memory_types: Sequence[str]) -> None:
        """What the sender can write to, best first; before that, and without any, the stream."""
        ...

    def expect(
        self, segment: int, seq: int, destinations: Sequence[Destination]
    ) -> Sequence[Destination]:
        """Announces a grant; returns it as the peer must see it: whose memory, which address."""
        ...

    async def unwritten(self, segment: int, seq: int, *, aborted: bool) -> Sequence[Destination]:
        """The sender gave a grant up: its destinations, to be granted again, on the stream.

        Returns once no byte of the grant can arrive any more; empty for a grant that is none.
        """
        ...

    async def quiet(self, *, aborted: bool) -> None:
        """The sender has stopped. Returns once no byte can arrive any more.

        Args:
            aborted: It stopped in the middle of a write, or died: bytes may still be under way.
        """
        ...

    def chunk(self, segment: int, offset: int, data: bytes) -> None:
        """Bytes that came on the stream, for the oldest grant that has not landed.

        `offset` counts through the grant's destinations in order. What fits no grant is dropped.
        """
        ...

    async def landed(self, segment: int, seq: int, crc32: int) -> int | None:
        """Called on the sender's word; waits for the bytes, but not for long.

        Returns:
            The bank of the slab they are in; None when they are not what was promised.
        """
        ...


OpenReceiver = Callable[[bytes], Receiver]
"""Makes the landing half for a new Fetch stream, given its id."""
