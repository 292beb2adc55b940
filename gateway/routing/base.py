"""The seats a router chooses among: what is there, how loaded it is, and whether it has failed.

Time is an argument (`clock`), so that policy is tested without waiting.
"""

from __future__ import annotations

import bisect
import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from chiasm.rows import RowFormat

FIRST_BACK_OFF_S = 0.5
MAX_BACK_OFF_S = 30.0
MAX_AGE_S = 5.0  # advice older than this says nothing
MAX_DOUBTS = 3  # failures in a row that may be the request's fault, before they are the seat's
FAULT_WEIGHT = 0.2  # of the newest call in the running mean
FAULT_PENALTY = 4.0  # one that fails every time counts as so many times slower, and one more
PACE_WEIGHT = 0.2
FIRST_PACES = 4  # the first calls of a seat are slow for many reasons: the fastest of them counts
OUTLIER = 2.0  # one call that took longer than so many usual ones counts as so many
ALIKE = 1.5  # paces that differ by less are one pace and noise
HALF_LIFE_S = 20.0  # of what is known of pace and faults
MOST_WEIGHED = 40  # seats, for one choice
SLOWEST = 8.0  # no one is held for slower
FLAP_S = 60.0  # an endpoint that was lost again within so long is flapping
MAX_FLAP_BACK_OFF_S = 8.0

_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One verified encoder worker or decoder. We dial `address`, other peers `advertised`."""

    address: str
    advertised: str
    instance_id: str
    epoch: int
    rows: RowFormat
    tower: bytes
    max_model_len: int = 0
    language_model: bytes = b""
    max_item_patches: int = 0
    """Of an encoder; 0 = not said."""
    features: frozenset[str] = frozenset()
    """What it can do beside the contract's least."""

    def fits(self, other: Endpoint) -> bool:
        """Whether rows made by one are taken by the other. Unknown towers fit any."""
        same_tower = not self.tower or not other.tower or self.tower == other.tower
        return self.rows == other.rows and same_tower


@dataclass(frozen=True, slots=True)
class Advice:
    """What an endpoint said of itself: its backlog in the router's unit of work."""

    backlog: int
    usage: float = 0.0
    draining: bool = False


@dataclass(slots=True)
class Seat:
    """One endpoint and what is known of its state."""

    endpoint: Endpoint
    key: int = field(init=False)
    charged: int = 0  # work we have under way there
    advice: Advice = field(default_factory=lambda: Advice(0))
    advised_at: float = -MAX_AGE_S
    failures: int = 0
    doubts: int = 0
    ejected_until: float = 0.0
    held_off_until: float = 0.0  # it flaps: only if there is no other
    pace_s: float = 0.0  # of one unit of work, a running mean; 0 = not known
    num_paces: int = 0
    """Measurements of it; few say nothing yet."""
    paced_at: float = 0.0
    fault_share: float = 0.0  # of its latest calls, a running mean
    faulted_at: float = 0.0

    def __post_init__(self) -> None:
        name = hashlib.blake2b(self.endpoint.address.encode(), digest_size=8)
        self.key = int.from_bytes(name.digest(), "big")

    def faults(self, now: float) -> float:
        """Share of calls that fail; with time it is forgotten, so that all are tried again."""
        if not self.fault_share:
            return 0.0
        fresh: float = 0.5 ** ((now - self.faulted_at) / HALF_LIFE_S)
        return self.fault_share * fresh

    def load(self, now: float) -> int:
        """Work under way: ours, or what it says of all gateways' together."""
        fresh = now - self.advised_at <= MAX_AGE_S
        return max(self.charged, self.advice.backlog if fresh else 0)


class Charge:
    """Work booked on a seat. `release` may be called more than once."""

    def __init__(
        self, seat: Seat | None, amount: int, on_release: Callable[[], None] | None = None
    ) -> None:
        self._seat = seat
        self._amount = amount
        self._on_release = on_release
        if seat is not None:
            seat.charged += amount

    def release(self) -> None:
        """Takes the work off the seat."""
        if self._seat is not None:
            self._seat.charged -= self._amount
        self._seat = None
        if self._on_release is not None:
            self._on_release()
        self._on_release = None


class Router(ABC):
    """Keeps the seats of one role. Owns no connection."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seats: dict[str, Seat] = {}
        self._ring: list[tuple[int, str]] = []  # seats by their keys, for `_near`
        self._losses: dict[str, tuple[int, float]] = {}  # by address: how often, and when last

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """All of them, ejected ones included."""
        return tuple(seat.endpoint for seat in self._seats.values())

    @property
    def taking(self) -> tuple[Endpoint, ...]:
        """Those that have not said that they take no new work."""
        return tuple(s.endpoint for s in self._seats.values() if not s.advice.draining)

    def join(self, endpoint: Endpoint) -> None:
        """Adds an endpoint; one that came back as another process starts afresh.

        Back after one loss it is used at once; one that flaps is held off longer each time.
        """
        known = self._seats.get(endpoint.address)
        if known is None or known.endpoint != endpoint:
            seat = self._seats[endpoint.address] = Seat(endpoint)
            if known is None:
                bisect.insort(self._ring, (seat.key, endpoint.address))
            losses, at = self._losses.get(endpoint.address, (0, 0.0))
            if losses > 1 and self._clock() - at < FLAP_S:
                back_off = min(MAX_FLAP_BACK_OFF_S, FIRST_BACK_OFF_S * 2 ** (losses - 1))
                seat.held_off_until = self._clock() + back_off

    def leave(self, address: str) -> None:
        """Removes an endpoint; charges on it may still be released."""
        if (seat := self._seats.pop(address, None)) is not None:
            self._ring.remove((seat.key, address))

    def lost(self, address: str) -> None:
        """`leave`, of one that broke its lease."""
        if address in self._seats:
            now = self._clock()
            self._losses = {a: x for a, x in self._losses.items() if now - x[1] < FLAP_S}
            losses, _ = self._losses.get(address, (0, 0.0))
            self._losses[address] = (min(losses + 1, 16), now)
        self.leave(address)

    def advise(self, address: str, advice: Advice) -> None:
        """Takes in what an endpoint says of itself."""
        if seat := self._seats.get(address):
            seat.advice = advice
            seat.advised_at = self._clock()

    def charge(self, address: str, amount: int) -> Charge:
        """Books work; release the charge when it is done."""
        return Charge(self._seats.get(address), amount)

    def failed(self, endpoint: Endpoint) -> None:
        """Ejects for a back-off that doubles with every failure in a row."""
        seat = self._seats.get(endpoint.address)
        if seat is None or seat.endpoint != endpoint:
            return
        back_off = min(MAX_BACK_OFF_S, FIRST_BACK_OFF_S * 2**seat.failures)
        seat.failures = min(seat.failures + 1, 16)
        seat.fault_share += (1.0 - seat.fault_share) * FAULT_WEIGHT
        seat.faulted_at = self._clock()
        seat.ejected_until = self._clock() + back_off

    def doubted(self, endpoint: Endpoint) -> None:
        """It answers, but made no rows: several in a row, whatever the requests, are a failure."""
        seat = self._seats.get(endpoint.address)
        if seat is not None and seat.endpoint == endpoint:
            seat.doubts += 1
            if seat.doubts >= MAX_DOUBTS:
                self.failed(endpoint)

    def succeeded(self, endpoint: Endpoint, *, pace_s: float = 0.0) -> None:
        """Forgets failures in a row; `pace_s` is what a unit of work took, 0 = not measured."""
        seat = self._seats.get(endpoint.address)
        if seat is None or seat.endpoint != endpoint:
            return
        seat.failures = seat.doubts = 0
        seat.ejected_until = 0.0
        seat.fault_share -= seat.fault_share * FAULT_WEIGHT
        if pace_s > 0:
            if seat.num_paces < FIRST_PACES:
                seat.pace_s = min(pace_s, seat.pace_s or pace_s)
            else:
                taken_s = min(pace_s, OUTLIER * seat.pace_s)  # a stall makes no seat slow
                seat.pace_s += (taken_s - seat.pace_s) * PACE_WEIGHT
            seat.num_paces += 1
            seat.paced_at = self._clock()

    def _near(self, key: bytes) -> list[Seat]:
        """All seats, or of a large fleet those that come next on a ring (Karger and others 1997).

        A policy that weighs them all would take milliseconds; so it weighs as many of a thousand
        as of forty, and seats that come and go move no more content than they must.
        """
        if len(self._ring) <= MOST_WEIGHED:
            return list(self._seats.values())
        at = bisect.bisect(self._ring, (int.from_bytes(key[-8:], "big"), ""))
        turn = self._ring[at : at + MOST_WEIGHED]
        turn += self._ring[: MOST_WEIGHED - len(turn)]
        return [self._seats[address] for _, address in turn]

    def _open(
        self, exclude: Collection[Endpoint], among: Collection[Seat] | None = None
    ) -> list[Seat]:
        """Seats that may be chosen now; those that flap only if there is no other."""
        now = self._clock()
        seats = [
            seat
            for seat in (self._seats.values() if among is None else among)
            if seat.endpoint not in exclude
            and not seat.advice.draining
            and seat.ejected_until <= now
        ]
        return [seat for seat in seats if seat.held_off_until <= now] or seats

    def _slowness(self, seats: Collection[Seat]) -> list[float]:
        """How much longer a unit of work takes at each than at a usual one; failing counts too.

        What is known fades: a slow one is tried again after a while, and may have got better.
        """
        known = sorted(seat.pace_s for seat in seats if seat.num_paces >= FIRST_PACES)
        usual = known[len(known) // 2] if known else 0.0
        now = self._clock()
        found = []
        for seat in seats:
            slow = 1.0
            ratio = seat.pace_s / usual if usual and seat.num_paces >= FIRST_PACES else 1.0
            if not 1 / ALIKE <= ratio <= ALIKE:
                fresh = 0.5 ** ((now - seat.paced_at) / HALF_LIFE_S)
                slow += (min(ratio, SLOWEST) - 1.0) * fresh
            found.append(max(slow, 1 / SLOWEST) * (1.0 + FAULT_PENALTY * seat.faults(now)))
        return found

    @abstractmethod
    def check(self) -> None:
        """Asserts the router's invariants."""


def rank(key: bytes, seat_key: int) -> int:
    """Rendezvous hashing: the seat with the highest rank owns the key (Thaler, Ravishankar 1998).

    When a seat goes only its own keys move. Both are hashes already; they are mixed by the
    finalizer of splitmix64 (Steele, Lea, Flood 2014), because all seats are asked for every key.
    """
    mixed = int.from_bytes(key[-8:], "big") ^ seat_key
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _WORD
    return mixed ^ mixed >> 31
