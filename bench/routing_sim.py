"""Routing policies without a network: simulated replicas, skewed content, some slow, some dying.

Time is simulated, everything is seeded. Every policy sees the same requests and the same deaths,
and all eject who fails; they differ in whom they choose. Run as `python -m bench.routing_sim`;
writes bench/RESULTS-routing.md. Exit code 1: ours is not the best on p99 somewhere.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import itertools
import math
import random
import sys
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chiasm.rows import RowFormat
from gateway.routing import EncoderRouter, Endpoint
from gateway.routing.base import Advice, Charge, Router, rank

RESULTS = Path(__file__).with_name("RESULTS-routing.md")
ROWS = RowFormat(8, 1, "float32")
ADVICE_S = 0.5
TIMEOUT_S = 0.5  # until a call to one that hangs is given up
ATTEMPTS = 4
LONGEST_S = 600.0


class Random(Router):
    """Anybody."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock=clock)
        self._draw = random.Random(7)

    def pick(
        self, digest: bytes, patches: int, *, exclude: Collection[Endpoint] = ()
    ) -> Endpoint | None:
        seats = self._open(exclude)
        return self._draw.choice(seats).endpoint if seats else None

    def book(self, endpoint: Endpoint, digest: bytes, patches: int) -> Charge:
        return self.charge(endpoint.address, patches)

    def check(self) -> None:
        pass


class RoundRobin(Random):
    """Everybody in turn."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._next = itertools.count()

    def pick(
        self, digest: bytes, patches: int, *, exclude: Collection[Endpoint] = ()
    ) -> Endpoint | None:
        seats = self._open(exclude)
        return seats[next(self._next) % len(seats)].endpoint if seats else None


class LeastLoaded(Random):
    """Who has the least work: of ours, or by what it says."""

    def pick(
        self, digest: bytes, patches: int, *, exclude: Collection[Endpoint] = ()
    ) -> Endpoint | None:
        seats, now = self._open(exclude), self._clock()
        self._draw.shuffle(seats)
        return min(seats, key=lambda seat: seat.load(now)).endpoint if seats else None


class ConsistentHash(Random):
    """The owner of the content, whatever it has to do (rendezvous)."""

    def pick(
        self, digest: bytes, patches: int, *, exclude: Collection[Endpoint] = ()
    ) -> Endpoint | None:
        seats = self._open(exclude)
        return max(seats, key=lambda s: rank(digest, s.key)).endpoint if seats else None


class Clock:
    """Simulated seconds."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


POLICIES = {
    "random": Random,
    "round robin": RoundRobin,
    "least loaded": LeastLoaded,
    "consistent hash": ConsistentHash,
    "ours": lambda clock: EncoderRouter(clock=clock),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One experiment."""

    name: str
    replicas: int
    requests: int
    seed: int = 1
    utilisation: float = 0.7  # of all replicas together, were nothing ever cached
    contents: int = 12  # different pictures, for each replica
    skew: float = 1.0  # Zipf's exponent
    cached: int = 24  # pictures a replica keeps
    slow_share: float = 0.1  # of replicas take three times as long
    deaths: int = 0  # 0 = one for each ten replicas, at least two
    down_s: float = 5.0


BUSY = {"utilisation": 1.1, "contents": 40, "cached": 16, "skew": 0.8}


@dataclass(slots=True)
class Replica:
    """First come, first served; one picture at a time."""

    endpoint: Endpoint
    s_per_patch: float
    free_at: float = 0.0
    work: list[tuple[float, int]] = field(default_factory=list)  # (end, patches)
    cache: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    under_way: dict[bytes, float] = field(default_factory=dict)  # digest: end; others join it
    down: list[tuple[float, float]] = field(default_factory=list)

    def is_down(self, at: float) -> bool:
        return any(begin <= at < end for begin, end in self.down)

    def dies_in(self, begin: float, end: float) -> float | None:
        """When it dies in that time, if it does."""
        return min((b for b, _ in self.down if begin < b <= end), default=None)

    def backlog(self, now: float) -> int:
        self.work = [(end, patches) for end, patches in self.work if end > now]
        return sum(patches for _, patches in self.work)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one policy made of one setting."""

    waits_s: tuple[float, ...]
    hits: int
    retries: int
    lost: int
    pick_us: float


@dataclass(frozen=True, slots=True)
class Request:
    at: float
    digest: bytes
    patches: int


def requests_of(setting: Setting) -> Iterator[Request]:
    """Poisson arrivals, Zipf content, sizes that spread over two orders of magnitude."""
    draw = random.Random(setting.seed)
    count = setting.contents * setting.replicas
    sizes = [int(min(16_000, max(64, draw.lognormvariate(7.0, 1.0)))) for _ in range(count)]
    weights = list(itertools.accumulate(1 / (i + 1) ** setting.skew for i in range(count)))
    mean = sum(
        size * (w - before)
        for size, w, before in zip(sizes, weights, [0.0, *weights], strict=False)
    )
    rate = setting.utilisation * setting.replicas / (mean / weights[-1] * S_PER_PATCH)
    now = 0.0
    for _ in range(setting.requests):
        now += draw.expovariate(rate)
        index = draw.choices(range(count), cum_weights=weights)[0]
        yield Request(now, hashlib.sha256(b"%d" % index).digest(), sizes[index])


S_PER_PATCH = 25e-6


def replicas_of(setting: Setting, until: float) -> list[Replica]:
    draw = random.Random(setting.seed + 1)
    found = []
    for index in range(setting.replicas):
        name = f"encoder-{index}:1"
        endpoint = Endpoint(name, name, name, 1, ROWS, b"tower")
        slow = 3.0 if draw.random() < setting.slow_share else 1.0
        found.append(Replica(endpoint, S_PER_PATCH * slow))
    for _ in range(setting.deaths or max(2, setting.replicas // 10)):
        begin = draw.uniform(0.1, 0.8) * until
        draw.choice(found).down.append((begin, begin + min(setting.down_s, until / 10)))
    return found


class Simulation:
    """One policy, one setting."""

    def __init__(self, setting: Setting, policy: str) -> None:
        self._clock = Clock()
        self._router = POLICIES[policy](self._clock)
        self._arrivals = list(requests_of(setting))
        self._replicas = {
            replica.endpoint.address: replica
            for replica in replicas_of(setting, self._arrivals[-1].at)
        }
        self._cached = setting.cached
        for replica in self._replicas.values():
            self._router.join(replica.endpoint)
        self._events: list[tuple[float, int, object]] = []
        self._numbers = itertools.count()
        self._waits: list[float] = []
        self._answered = 0
        self._counts_from = self._arrivals[len(self._arrivals) // 5].at  # caches are warm by then
        self._hits = self._retries = self._lost = 0
        self._pick_s = 0.0
        self._picks = 0

    def run(self) -> Outcome:
        for request in self._arrivals:
            self._at(request.at, lambda r=request: self._try(r, 1))
        for index, replica in enumerate(self._replicas.values()):
            self._at(index / len(self._replicas) * ADVICE_S, lambda r=replica: self._advise(r))
        last = self._arrivals[-1].at
        while self._events:
            self._clock.now, _, action = heapq.heappop(self._events)
            if self._clock.now > last + LONGEST_S:
                break
            action()  # type: ignore[operator]
            if self._answered + self._lost == len(self._arrivals):
                break
        self._router.check()
        return Outcome(
            tuple(self._waits),
            self._hits,
            self._retries,
            self._lost,
            self._pick_s / self._picks * 1e6,
        )

    def _at(self, when: float, action: object) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), action))

    def _advise(self, replica: Replica) -> None:
        now = self._clock.now
        if not replica.is_down(now):
            self._router.advise(replica.endpoint.address, Advice(replica.backlog(now)))
        self._at(now + ADVICE_S, lambda: self._advise(replica))

    def _try(self, request: Request, attempt: int, tried: tuple[Endpoint, ...] = ()) -> None:
        began = time.perf_counter()
        found = self._router.pick(request.digest, request.patches, exclude=tried)
        self._pick_s += time.perf_counter() - began
        self._picks += 1
        if found is None and attempt <= ATTEMPTS:
            self._at(self._clock.now + 0.1, lambda: self._try(request, attempt + 1))
            return
        if found is None or attempt > ATTEMPTS:
            self._lost += 1
            return
        self._encode(request, self._replicas[found.address], attempt, (*tried, found))

    def _encode(
        self, request: Request, replica: Replica, attempt: int, tried: tuple[Endpoint, ...]
    ) -> None:
        now = self._clock.now
        charge = self._router.book(replica.endpoint, request.digest, request.patches)

        def failed() -> None:
            charge.release()
            self._router.failed(replica.endpoint)
            self._retries += 1
            self._try(request, attempt + 1, tried)

        if replica.is_down(now):
            self._at(now + TIMEOUT_S, failed)
            return
        joins = replica.under_way.get(request.digest, 0.0) > now
        hit = joins or request.digest in replica.cache
        cost = 0.0 if hit else request.patches * replica.s_per_patch
        end = replica.under_way[request.digest] if joins else now
        if not hit:
            end = replica.under_way[request.digest] = max(now, replica.free_at) + cost
        death = replica.dies_in(now, end)
        if death is not None:
            replica.free_at = death
            replica.cache.clear()
            replica.under_way.clear()
            self._at(death + TIMEOUT_S, failed)
            return
        replica.free_at = max(replica.free_at, end)
        replica.work.append((end, 0 if hit else request.patches))

        def done() -> None:
            charge.release()
            replica.under_way.pop(request.digest, None)
            self._router.succeeded(replica.endpoint, pace_s=cost / request.patches)
            replica.cache[request.digest] = None
            replica.cache.move_to_end(request.digest)
            while len(replica.cache) > self._cached:
                replica.cache.popitem(last=False)
            self._answered += 1
            if request.at >= self._counts_from:
                self._hits += hit
                self._waits.append(self._clock.now - request.at)

        self._at(end, done)


def compare(settings: Sequence[Setting]) -> tuple[str, bool]:
    """A table, and whether ours has the best p99 everywhere."""
    lines = [
        "| replicas | | policy | p50 ms | p99 ms | found in cache | retries | lost | pick us |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    good = True
    for setting in settings:
        p99 = {}
        for policy in POLICIES:
            made = Simulation(setting, policy).run()
            waits = sorted(made.waits_s)
            p99[policy] = waits[math.ceil(0.99 * len(waits)) - 1]
            p50 = waits[len(waits) // 2]
            lines.append(
                f"| {setting.replicas} | {setting.name} | {policy} "
                f"| {p50 * 1e3:.0f} | {p99[policy] * 1e3:.0f} "
                f"| {100 * made.hits / len(waits):.0f} % "
                f"| {made.retries} | {made.lost} | {made.pick_us:.0f} |"
            )
            print(lines[-1], flush=True)
        # A long tail of few requests: within a tenth is the same.
        good &= p99["ours"] <= 1.1 * min(p99.values())
    return "\n".join(lines), good


def main() -> None:
    """Simulates, prints, writes down, judges."""
    parser = argparse.ArgumentParser(prog="python -m bench.routing_sim", description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--requests", type=int, default=100, help="for each replica")
    parser.add_argument("--no-write", action="store_true")
    args = parser.parse_args()
    settings = [
        Setting(name, n, n * args.requests, **changes)  # type: ignore[arg-type]
        for n in args.replicas
        for name, changes in (("calm", {}), ("busy", BUSY))
    ]
    text, good = compare(settings)
    if not args.no_write:
        RESULTS.write_text(_PAGE.format(requests=args.requests, table=text), encoding="utf-8")
    sys.exit(0 if good else 1)


_PAGE = """# Routing, simulated

Written by `python -m bench.routing_sim`. {requests} requests for each replica, the first fifth not
counted; Poisson arrivals, Zipf content. Calm: 70 % of what all replicas could do without a cache,
twelve pictures a replica, of which each keeps 24. Busy: 110 %, 40 pictures a replica, each keeps
16. A tenth of the replicas is three times as slow; one in ten dies for a while: calls hang for half
a second, its cache is lost. All policies eject who fails. "Ours" is `gateway.routing.EncoderRouter`
itself. Where everything fits into the caches, pure hashing is as good.

{table}
"""


if __name__ == "__main__":
    main()
