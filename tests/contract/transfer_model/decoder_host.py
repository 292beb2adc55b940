"""One decoder of the model: the real receiver, a slab of names, and the strictest engine there is.

The engine serves requests first come, first served: only the oldest unfinished one consumes rows.
Whatever waits behind it must not be able to hold it up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from chiasm.plan import Cause, Promise, Source, Span
from chiasm.rows import RowFormat
from chiasm.transport import DRAM, STREAM
from chiasm.v1 import encoder_pb2
from decoder_svc.embeddings.events import (
    Accepted,
    Broken,
    Cancel,
    Demand,
    Failed,
    Fence,
    Fenced,
    FetchCommand,
    Grant,
    Landed,
    Notice,
    Open,
    Quiesced,
    Ready,
)
from decoder_svc.embeddings.receiver import EmbeddingReceiver
from encoder_svc.fetch_session import FetchOpening
from tests.contract.transfer_model.encoder_host import (
    FORMAT,
    ROW,
    EncoderHost,
    FetchWire,
    Violation,
)
from tests.contract.transfer_model.memory import SlabMemory

PAGES = 5
PAGE_ROWS = 2
MAX_RUNNING = 3
WINDOW_ROWS = 4
PAGE = PAGE_ROWS * ROW  # bytes


@dataclass(eq=False)
class Running:
    """One request as the engine sees it."""

    request_id: str
    digests: list[bytes]  # by item
    num_rows: list[int]
    text: list[int]  # by item: steps of text before it
    consumed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.consumed = [0] * len(self.digests)

    @property
    def item(self) -> int | None:
        """The item that is being prefilled, or is next to be."""
        for index, rows in enumerate(self.num_rows):
            if self.consumed[index] < rows:
                return index
        return None

    def prefill_text(self) -> bool:
        """One step of the text before the next item."""
        if self.item is None or not self.text[self.item]:
            return False
        self.text[self.item] -= 1
        return True

    @property
    def done(self) -> bool:
        return self.consumed == self.num_rows


class DecoderHost:
    """Receiver, slab and engine; executes the receiver's commands on the model's network."""

    def __init__(
        self,
        name: str,
        hosts: Mapping[str, EncoderHost],
        tell: Callable[[Notice], None],
        memory: SlabMemory,
    ) -> None:
        self.name = name
        self.requests: list[Running] = []  # by arrival
        self.fences: list[Fence] = []
        self.wires: dict[bytes, FetchWire] = {}  # open ones
        self._memory = memory
        self._owners: dict[int, bytes] = {}  # page: the fetch it was last granted to
        self._hosts = hosts
        self._tell = tell
        ids = itertools.count(1)
        self.receiver = EmbeddingReceiver(
            pages=PAGES,
            page_rows=PAGE_ROWS,
            row_bytes=ROW,
            reserve_rows=3,
            grant_pages=2,
            row_format=FORMAT,
            new_id=lambda: name.encode() + str(next(ids)).encode(),
        )

    # The engine.

    def add(self, request_id: str, promises: list[Promise]) -> None:
        self.requests.append(
            Running(
                request_id,
                [p.plan.digest for p in promises],
                [p.plan.num_rows for p in promises],
                text=[p.plan.num_rows * (i + 1) % 4 for i, p in enumerate(promises)],
            )
        )
        self.receiver.add(request_id, promises)
        self.step()

    def step(self) -> None:
        """Grants for the next rows of those admitted, then commands and notices go out."""
        self.receiver.grant(
            [
                self._demand(request, item)
                for request in self.requests[:MAX_RUNNING]
                for item in range(len(request.digests))
            ]
        )
        self.flush()

    def _demand(self, request: Running, item: int) -> Demand:
        """The next rows; nothing behind text, but a place among the others all the same."""
        begin, end = request.consumed[item], request.num_rows[item]
        end = min(begin + WINDOW_ROWS, end)
        if any(request.text[: item + 1]):
            end = begin
        return Demand(request.request_id, item, Span(begin, end))

    def consume(self) -> bool:
        """Text of everybody, then what has landed of the oldest; whether there was anything."""
        if not self.requests:
            return False
        oldest = self.requests[0]
        moved = sum(request.prefill_text() for request in self.requests[:MAX_RUNNING]) > 0
        item = oldest.item
        if moved or (item is not None and oldest.text[item]):
            return moved
        if item is not None:
            begin = oldest.consumed[item]
            end = self.receiver.landed_until(oldest.request_id, item, begin)
            if end == begin:
                return False
            self._compare(oldest, item, Span(begin, end))
            oldest.consumed[item] = end
            self.receiver.consume(oldest.request_id, item, end)
        self.flush()
        if oldest.done:
            self.leave(oldest.request_id)
        return True

    def _compare(self, request: Running, item: int, span: Span) -> None:
        runs = self.receiver.locate(request.request_id, item, span)
        found = [
            self._memory.read(run.first_slab_row + i) for run in runs for i in range(run.num_rows)
        ]
        wanted = [(request.digests[item], row) for row in range(span.begin, span.end)]
        if found != wanted:
            raise Violation(f"{request.request_id} got {found} for {wanted}")

    def preempt(self, request: Running, item: int, row: int) -> None:
        """The request loses its KV pages from a row of an item on."""
        needed = {item: min(row, request.consumed[item])}
        for later in range(item + 1, len(request.digests)):
            needed[later] = 0
        for index, first in needed.items():
            request.consumed[index] = first
        self.receiver.preempt(request.request_id, needed)
        self.flush()

    def leave(self, request_id: str) -> None:
        """Finished, failed or aborted."""
        self.requests = [r for r in self.requests if r.request_id != request_id]
        self.receiver.release(request_id)
        self.flush()

    def redirect(self, request_id: str, item: int, part: int, attempt: int, source: Source) -> None:
        self.receiver.redirect(request_id, item, part, attempt, source)
        self.flush()

    def add_source(
        self, request_id: str, item: int, part: int, attempt: int, source: Source
    ) -> None:
        self.receiver.add_source(request_id, item, part, attempt, source)
        self.flush()

    # The fetcher.

    def flush(self) -> None:
        for command in self.receiver.take_commands():
            self._execute(command)
        for notice in self.receiver.take_notices():
            self._tell(notice)

    def _execute(self, command: FetchCommand) -> None:
        match command:
            case Open():
                self._open(command)
            case Grant():
                if (wire := self.wires.get(command.fetch_id)) is not None:
                    for place in command.destinations:
                        first, last = place.address, place.address + place.length - 1
                        for page in range(first // PAGE, last // PAGE + 1):
                            self._owners[page] = command.fetch_id
                    self._send(wire, command)
            case Cancel():
                if (wire := self.wires.get(command.fetch_id)) is not None:
                    wire.up.send("cancel")
            case Fence():
                self.fences.append(command)

    def _send(self, wire: FetchWire, command: Grant) -> None:
        """A grant of memory, or, once that could not be written, of the stream."""
        wire.sent.append(command)
        kind = STREAM if wire.streaming else DRAM
        if wire.streaming:
            wire.on_stream.add(len(wire.sent))
        places = [replace(place, memory_type=kind) for place in command.destinations]
        grant = encoder_pb2.FetchGrant(
            segment=command.segment, destinations=[place.to_proto() for place in places]
        )
        wire.up.send(grant)

    def _open(self, command: Open) -> None:
        wire = FetchWire(command.fetch_id, self._write_row)
        host = self._hosts[command.source.endpoint]
        host.open_fetch(
            wire,
            lambda message: self._on_fetch(wire, message),
            lambda seq: self._on_notice(wire, seq),
        )
        self.wires[command.fetch_id] = wire
        wire.up.send(
            FetchOpening(
                fetch_id=command.fetch_id,
                digest=command.digest,
                rows=command.rows,
                encode_id=command.source.encode_id,
                encoder_epoch=command.source.encoder_epoch,
                format=FORMAT,
            )
        )

    def _write_row(self, fetch_id: bytes, address: int, digest: bytes, row: int) -> None:
        slab_row = address // ROW
        owner = self._owners.get(slab_row // PAGE_ROWS)
        if owner != fetch_id:
            raise Violation(f"a row of {fetch_id!r} was written into a page granted to {owner!r}")
        self._memory.write(slab_row, digest, row)

    def break_fetch(self, wire: FetchWire) -> None:
        """The stream breaks: we hear of it now, the encoder after what is in flight to it."""
        wire.broken = True
        wire.down.drop()
        wire.up.send("broken")
        self._on_fetch(wire, "broken")

    def _on_fetch(self, wire: FetchWire, message: object) -> None:
        fetch_id = wire.fetch_id
        if fetch_id not in self.wires:
            return
        if message == "broken":
            del self.wires[fetch_id]
            self.receiver.on_event(Broken(fetch_id))
        else:
            assert isinstance(message, encoder_pb2.FetchResponse)
            self._on_response(fetch_id, message)
        self.flush()

    def _on_notice(self, wire: FetchWire, seq: int) -> None:
        """Memory says that a grant is whole, sooner or later than the stream does."""
        if wire.fetch_id in self.wires:
            grant = wire.sent[seq - 1]
            self.receiver.on_event(Landed(wire.fetch_id, grant.segment, grant.seq))
            self.flush()

    def _on_response(self, fetch_id: bytes, response: encoder_pb2.FetchResponse) -> None:
        match response.WhichOneof("kind"):
            case "accepted":
                ahead = tuple(Span.from_proto(rows) for rows in response.accepted.segments)
                self.receiver.on_event(Accepted(fetch_id, ahead))
            case "ready":
                rows = Span.from_proto(response.ready.rows)
                row_format = RowFormat.from_proto(response.ready.format)
                self.receiver.on_event(Ready(fetch_id, response.ready.segment, rows, row_format))
            case "written":
                if response.written.seq in self.wires[fetch_id].on_stream:
                    grant = self.wires[fetch_id].sent[response.written.seq - 1]
                    self.receiver.on_event(Landed(fetch_id, grant.segment, grant.seq))
            case "unwritten":
                wire = self.wires[fetch_id]
                wire.streaming = True
                self._send(wire, wire.sent[response.unwritten.seq - 1])
            case "error":
                cause = Cause.from_proto(response.error.cause)
                self.receiver.on_event(Failed(fetch_id, cause, response.error.message))
            case "quiesced":
                del self.wires[fetch_id]
                self.receiver.on_event(Quiesced(fetch_id))

    def try_fence(self, fence: Fence) -> bool:
        """One Fence call; whether it was answered."""
        if not self._hosts[fence.endpoint].fenced(fence.fetch_id, fence.epoch):
            return False
        self.fences.remove(fence)
        self.receiver.on_event(Fenced(fence.fetch_id))
        self.flush()
        return True
