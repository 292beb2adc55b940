"""Rows on the Fetch stream itself, in chunks: works everywhere, needs no RDMA.

The writer into the decoder's memory is the decoder's own task, so a chunk that no grant asked for
is dropped here, whatever the peer does.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from chiasm.plan import Span
from chiasm.transport.base import HOST_BANK, STREAM, Destination, RowSource, Send, Sender
from chiasm.v1 import encoder_pb2

CHUNK_BYTES = 1 << 20


class StreamSender:
    """Implements `Sender`.

    Args:
        send: Awaited for every chunk, so that a slow reader makes a slow writer, not a long queue.
    """

    def __init__(self, send: Send) -> None:
        self._send = send

    async def write(
        self,
        segment: int,
        *,
        seq: int,
        rows: Span,
        source: RowSource,
        destinations: Sequence[Destination],
    ) -> int:
        """Sends one grant's bytes; see `Sender.write`."""
        crc32 = offset = 0
        for run, nbytes in _runs(destinations):
            row_bytes = nbytes // len(run)
            step = max(1, CHUNK_BYTES // row_bytes)
            for begin in range(run.begin, run.end, step):
                end = min(begin + step, run.end)
                data = bytes(source.read(begin - rows.begin, end - rows.begin))
                chunk = encoder_pb2.FetchChunk(segment=segment, offset=offset, data=data)
                await self._send(encoder_pb2.FetchResponse(chunk=chunk))
                crc32 = zlib.crc32(data, crc32)
                offset += len(data)
        return crc32


class StreamOutbound:
    """Implements `Outbound`: there is always a stream."""

    async def reach(self, peers: Sequence[encoder_pb2.Peer]) -> tuple[str, ...]:
        """Nobody's memory is written."""
        return ()

    def open(self, send: Send, fetch_id: bytes, peers: Sequence[encoder_pb2.Peer]) -> Sender:
        """See `Outbound.open`."""
        return StreamSender(send)


def _runs(destinations: Sequence[Destination]) -> Iterator[tuple[Span, int]]:
    """Neighbouring rows together, with their bytes: pages of the receiver cut no chunk."""
    run, nbytes = Span(0, 0), 0
    for place in destinations:
        if len(run) and place.rows.begin == run.end:
            run, nbytes = Span(run.begin, place.rows.end), nbytes + place.length
            continue
        if len(run):
            yield run, nbytes
        run, nbytes = place.rows, place.length
    if len(run):
        yield run, nbytes


@dataclass(slots=True)
class _Expected:
    segment: int
    seq: int
    destinations: Sequence[Destination]
    nbytes: int
    received: int = 0
    crc32: int = 0


class StreamReceiver:
    """Implements `Receiver`.

    Args:
        write: Copies bytes to an offset of the slab.
    """

    one_sided = False
    memory_type = STREAM

    def __init__(self, write: Callable[[int, memoryview], None]) -> None:
        self.num_dropped = 0  # chunks that no grant asked for
        self.on_arrived: Callable[[int, int], None] = lambda seq, bank: None
        self._write = write
        self._expected: deque[_Expected] = deque()

    def peers(self) -> Sequence[encoder_pb2.Peer]:
        """None: rows come on the stream."""
        return ()

    def accepted(self, memory_types: Sequence[str]) -> None:
        """Whatever else it could write to: rows come on the stream."""

    def expect(
        self, segment: int, seq: int, destinations: Sequence[Destination]
    ) -> Sequence[Destination]:
        """Announces a grant."""
        nbytes = sum(place.length for place in destinations)
        self._expected.append(_Expected(segment, seq, destinations, nbytes))
        return destinations

    def chunk(self, segment: int, offset: int, data: bytes) -> None:
        """Writes a chunk where the oldest open grant wants it; see `Receiver.chunk`."""
        grant = self._expected[0] if self._expected else None
        if (
            grant is None
            or grant.segment != segment
            or grant.received != offset
            or offset + len(data) > grant.nbytes
        ):
            self.num_dropped += 1
            return
        grant.crc32 = zlib.crc32(data, grant.crc32)
        grant.received += len(data)
        view = memoryview(data)
        edge = 0  # first byte of the destination, counted through the grant
        for place in grant.destinations:
            begin, end = max(edge, offset), min(edge + place.length, offset + len(data))
            if begin < end:
                self._write(place.address + begin - edge, view[begin - offset : end - offset])
            edge += place.length

    async def unwritten(self, segment: int, seq: int, *, aborted: bool) -> Sequence[Destination]:
        """A stream cannot refuse; what is said of it is not believed."""
        return ()

    async def quiet(self, *, aborted: bool) -> None:
        """The writer is this process's own: it is quiet already."""

    async def landed(self, segment: int, seq: int, crc32: int) -> int | None:
        """Whether the oldest open grant is whole and sound."""
        if not self._expected:
            return None
        grant = self._expected.popleft()
        found = (grant.segment, grant.seq, grant.received, grant.crc32)
        return HOST_BANK if found == (segment, seq, grant.nbytes, crc32) else None
