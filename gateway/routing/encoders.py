"""Encoders: the same picture goes to the same encoder, unless that one is far busier than the rest.

Rendezvous hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2018). A load is the time its
patches take: at an encoder that is slow, or that fails, the same patches weigh more.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection

from chiasm.runs import UNIT_PATCHES
from gateway.routing.base import Charge, Endpoint, Router, Seat, rank

RUN_PATCHES = 8 * UNIT_PATCHES  # the least work that is worth another copy of the file
BOUND = 2.0  # times the even share of time, after which a seat's keys overflow to the next


class EncoderRouter(Router):
    """Chooses encoder workers by digest."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock=clock)
        # Digests being encoded now: a second request joins the first, however busy the seat.
        self._under_way: dict[bytes, tuple[str, int]] = {}

    def pick(
        self,
        digest: bytes,
        patches: int,
        *,
        fits: Endpoint | None = None,
        tower: bytes | None = None,
        exclude: Collection[Endpoint] = (),
    ) -> Endpoint | None:
        """The worker for an item; None when there is none to choose from.

        Args:
            digest: Of the item.
            patches: Its work.
            fits: The decoder that will take the rows.
            tower: Only workers of this tower: the one the digest was made with.
            exclude: Endpoints not to choose; one that restarted is another.
        """
        now = self._clock()

        def usable(among: Collection[Seat] | None) -> list[Seat]:
            return [
                seat
                for seat in self._open(exclude, among)
                if (fits is None or seat.endpoint.fits(fits))
                and (tower is None or seat.endpoint.tower == tower)
            ]

        seats = usable(self._near(digest)) or usable(None)
        if not seats:
            return None
        joined, _ = self._under_way.get(digest, ("", 0))
        for seat in seats:
            if seat.endpoint.address == joined:
                return seat.endpoint
        slowness = self._slowness(seats)
        loads = [seat.load(now) for seat in seats]
        # What all would take if the work were spread as evenly as can be; then each one's own.
        even = (sum(loads) + patches) / sum(1 / slow for slow in slowness)
        times = [(load + patches) * slow for load, slow in zip(loads, slowness, strict=True)]
        bound = (BOUND - 1 / len(seats)) * max(even, patches)  # one of two has twice the even share
        within = [seat for seat, time in zip(seats, times, strict=True) if time <= bound]
        if within:
            return max(within, key=lambda seat: rank(digest, seat.key)).endpoint
        return seats[times.index(min(times))].endpoint

    def num_runs(self, patches: int, *, fits: Endpoint, tower: bytes) -> int:
        """Into how many runs a long clip is cut: over all workers, and under each one's limit.

        Short clips stay whole, because every run's encoder gets the whole file.
        """
        workers = [e for e in self.endpoints if e.fits(fits) and e.tower == tower]
        limits = [e.max_item_patches for e in workers if e.max_item_patches]
        needed = -(-patches // min(limits)) if limits else 1
        return max(1, needed, min(len(workers), patches // RUN_PATCHES))

    def book(self, endpoint: Endpoint, digest: bytes, patches: int) -> Charge:
        """Books an item's work; what joins work under way weighs nothing."""
        address, users = self._under_way.get(digest, (endpoint.address, 0))
        if address != endpoint.address:
            return self.charge(endpoint.address, patches)
        self._under_way[digest] = (address, users + 1)
        seat = self._seats.get(address)
        return Charge(seat, 0 if users else patches, lambda: self._unbook(digest))

    def _unbook(self, digest: bytes) -> None:
        address, users = self._under_way.pop(digest)
        if users > 1:
            self._under_way[digest] = (address, users - 1)

    def tower_for(self, decoder: Endpoint) -> bytes | None:
        """The tower most workers have among those whose rows this decoder takes; None if none.

        Several at once are seen only while a fleet is being replaced.
        """
        towers = Counter(seat.tower for seat in self.endpoints if seat.fits(decoder))
        return max(towers, key=lambda tower: (towers[tower], tower)) if towers else None

    def check(self) -> None:
        """No seat is charged less than nothing."""
        assert all(seat.charged >= 0 for seat in self._seats.values())
        assert all(users > 0 for _, users in self._under_way.values())
