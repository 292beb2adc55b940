"""All leases of one request: one per run of every digest, however many items show it."""

from __future__ import annotations

import asyncio
import math
import random
from contextlib import suppress
from typing import Any, Protocol

from chiasm.errors import ChiasmError
from chiasm.plan import Part, Promise
from chiasm.v1 import decoder_pb2
from gateway.encode_call import Scope
from gateway.lease import Lease
from gateway.order import Item, Order, split
from gateway.patience import PATIENCE_S


class Listener(Protocol):
    """Whom Encodings tells."""

    def encodings_settled(self) -> None:
        """Every item has been decoded: none can turn out to be the client's fault any more."""

    def encoding_failed(self, error: ChiasmError) -> None:
        """An item cannot be had; the request fails."""

    async def encoding_moved(self, move: decoder_pb2.GenerateRequest) -> None:
        """A part's rows come from elsewhere, or from elsewhere too: tell the decoder."""


class Encodings:
    """Owns the leases.

    Args:
        order: The planned request.
        scope: What its leases share.
        listener: Whom to tell.
    """

    def __init__(self, order: Order, scope: Scope, listener: Listener) -> None:
        self._items = order.items
        self._scope = scope
        self._listener = listener
        self._leases: dict[bytes, list[Lease]] = {}  # by digest, in the order of runs
        self._began = 0.0
        self._landing = asyncio.Condition()
        self._last_landed = -math.inf

    @property
    def settled(self) -> bool:
        """Every item was decoded, or is not needed."""
        return all(lease.settled for leases in self._leases.values() for lease in leases)

    async def assign(self) -> list[Promise]:
        """Chooses an encoder for every run; nothing is called yet. Raises Unavailable."""
        for item in self._items:
            if item.plan.digest not in self._leases:
                leases = self._leases[item.plan.digest] = self._leases_of(item)
                for lease in leases:
                    await lease.assign()
        return [self._promise(item) for item in self._items]

    def launch(self) -> None:
        """Opens every Encode."""
        self._began = self._scope.timeline.now()
        for leases in self._leases.values():
            for lease in leases:
                lease.launch()

    async def landed(self, index: int) -> None:
        """The decoder needs an item's rows from nobody any more."""
        for lease in self._leases[self._items[index].plan.digest]:
            await lease.landed(index)
        self._last_landed = self._scope.timeline.now()
        async with self._landing:
            self._landing.notify()

    async def lost(self, lost: decoder_pb2.EmbeddingLost) -> None:
        """The decoder could not get a part's rows: encode them again, or fail the request."""
        lease = self._leases[self._items[lost.item].plan.digest][lost.part]
        await lease.lost(lost.item, lost.attempt, lost.cause, lost.message)

    async def close(self) -> None:
        """Ends every Encode."""
        every = [lease for leases in self._leases.values() for lease in leases]
        await asyncio.gather(*(lease.close() for lease in every))
        self._leases.clear()

    async def lease_refused(self, lease: Lease) -> bool:
        """From a lease. A request may show more than its encoders hold at once: what has landed
        makes room for the rest. One after another, and refused only when nothing moves."""
        leases = (other for leases in self._leases.values() for other in leases)
        since_s = self._scope.timeline.now() - self._last_landed
        if since_s > PATIENCE_S and not any(o.holds_rows for o in leases if o is not lease):
            return False
        async with self._landing:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._landing.wait(), random.uniform(0.5, 1.5))
        return True

    def lease_settled(self) -> None:
        """From a lease; the first time that all are, the listener is told."""
        if self.settled:
            timeline = self._scope.timeline
            timeline.add("encode", timeline.since_ms(self._began))
            self._listener.encodings_settled()

    def lease_failed(self, error: ChiasmError) -> None:
        """From a lease."""
        self._listener.encoding_failed(error)

    async def lease_moved(self, lease: Lease) -> None:
        """From a lease: every item that still waits for it is redirected."""
        for place in self._places(lease):
            redirect = decoder_pb2.Redirect(**place)
            await self._listener.encoding_moved(decoder_pb2.GenerateRequest(redirect=redirect))

    async def lease_hedged(self, lease: Lease) -> None:
        """From a lease: every item that still waits for it gets a second source."""
        for place in self._places(lease):
            added = decoder_pb2.AddSource(**place)
            await self._listener.encoding_moved(decoder_pb2.GenerateRequest(add_source=added))

    def _places(self, lease: Lease) -> list[dict[str, Any]]:
        part, attempt, source = lease.run.part, lease.attempt, lease.source.to_proto()
        return [
            {"item": index, "part": part, "attempt": attempt, "source": source}
            for index in sorted(lease.waiting)
        ]

    def _leases_of(self, item: Item) -> list[Lease]:
        shown = tuple(other for other in self._items if other.plan.digest == item.plan.digest)
        num_runs = self._scope.fleet.encoders.num_runs(
            item.plan.patches, fits=self._scope.decoder, tower=item.tower
        )
        return [Lease(run, shown, self._scope, self) for run in split(item.plan, num_runs)]

    def _promise(self, item: Item) -> Promise:
        parts = tuple(
            Part(
                part=lease.run.part,
                rows=lease.run.rows,
                source=lease.source,
                frames=lease.run.frames,
                attempt=lease.attempt,
            )
            for lease in self._leases[item.plan.digest]
        )
        placeholders = item.runs if len(item.runs) > 1 else ()
        return Promise(item.index, item.plan, item.runs[0].begin, parts, placeholders)
