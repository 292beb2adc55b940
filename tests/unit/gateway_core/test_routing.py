"""Routing policy: affinity, bounded load, ejection and return. No sockets, no waiting."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from chiasm.rows import RowFormat
from gateway.routing import Charge, DecoderRouter, EncoderRouter, Endpoint, prefix_key
from gateway.routing.base import (
    FIRST_BACK_OFF_S,
    FLAP_S,
    HALF_LIFE_S,
    MAX_AGE_S,
    MAX_DOUBTS,
    MAX_FLAP_BACK_OFF_S,
    Advice,
)
from gateway.routing.encoders import BOUND, RUN_PATCHES

ROWS = RowFormat(8, 1, "float32")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def endpoint(name: str, *, epoch: int = 1, rows: RowFormat = ROWS, tower: bytes = b"t") -> Endpoint:
    return Endpoint(name, name, name, epoch, rows, tower, 4096)


def encoders(n: int) -> tuple[EncoderRouter, Clock]:
    clock = Clock()
    router = EncoderRouter(clock=clock)
    for index in range(n):
        router.join(endpoint(f"e{index}"))
    return router, clock


def digest(index: int) -> bytes:
    return index.to_bytes(32, "big")


def test_the_same_digest_goes_to_the_same_encoder_and_few_move_when_one_leaves() -> None:
    router, _ = encoders(4)
    before = {i: router.pick(digest(i), 10) for i in range(400)}
    assert before == {i: router.pick(digest(i), 10) for i in range(400)}
    shares = Counter(e.address for e in before.values())
    assert min(shares.values()) > 60
    router.leave("e2")
    after = {i: router.pick(digest(i), 10) for i in range(400)}
    assert all(before[i] == after[i] for i in before if before[i].address != "e2")


def test_load_is_bounded_and_weighed_in_patches() -> None:
    router, _ = encoders(3)
    charges = []
    for index in range(90):
        found = router.pick(digest(index), 100)
        charges.append((found.address, router.book(found, digest(index), 100)))
    shares = Counter(address for address, _ in charges)
    assert max(shares.values()) <= BOUND * 30 + 1
    for _, charge in charges:
        charge.release()
        charge.release()
    router.check()


def test_a_digest_under_way_is_joined_however_busy_its_encoder() -> None:
    router, _ = encoders(3)
    first = router.pick(digest(1), 100)
    charges = [router.book(first, digest(1), 100)]
    for _ in range(50):
        found = router.pick(digest(1), 100)
        assert found == first
        charges.append(router.book(found, digest(1), 100))
    busy = router.charge(first.address, 10**6)
    assert router.pick(digest(1), 100) == first
    for charge in charges:
        charge.release()
    assert router.pick(digest(1), 100) != first
    busy.release()
    router.check()


def test_failures_eject_for_a_growing_time_and_success_forgets_them() -> None:
    router, clock = encoders(1)
    only = router.endpoints[0]
    for round_ in range(3):
        router.failed(only)
        assert router.pick(digest(1), 1) is None
        clock.now += FIRST_BACK_OFF_S * 2**round_ * 0.99
        assert router.pick(digest(1), 1) is None
        clock.now += FIRST_BACK_OFF_S * 2**round_ * 0.02
        assert router.pick(digest(1), 1) == only
    router.succeeded(only)
    router.failed(only)
    clock.now += FIRST_BACK_OFF_S * 1.01
    assert router.pick(digest(1), 1) == only


def test_a_slow_encoder_gets_less_and_is_tried_again_after_a_while() -> None:
    router, clock = encoders(4)
    slow, *others = router.endpoints
    for _ in range(30):
        router.succeeded(slow, pace_s=4e-3)
        for other in others:
            router.succeeded(other, pace_s=1e-3)

    def shares() -> Counter[str]:
        booked = []
        for index in range(400):
            found = router.pick(digest(index), 100)
            booked.append((found.address, router.book(found, digest(index), 100)))
        for _, charge in booked:
            charge.release()
        return Counter(address for address, _ in booked)

    before = shares()
    assert 0 < before[slow.address] < 60  # four times as slow: a thirteenth is even
    assert min(before[other.address] for other in others) > 80
    clock.now += 10 * HALF_LIFE_S
    assert shares()[slow.address] > 70


def test_a_stall_makes_no_encoder_slow_and_slowness_that_stays_is_learned() -> None:
    """One that is taken for slow is asked no more while others idle, and so it would stay."""
    router, _ = encoders(3)
    stalled = router.endpoints[0]
    key = next(digest(i) for i in range(99) if router.pick(digest(i), 100) == stalled)
    for one in router.endpoints:
        for _ in range(8):
            router.succeeded(one, pace_s=1e-3)
    for _ in range(2):
        router.succeeded(stalled, pace_s=1.0)
        assert router.pick(key, 100) == stalled
        for _ in range(8):
            router.succeeded(stalled, pace_s=1e-3)
    for _ in range(12):
        router.succeeded(stalled, pace_s=4e-3)
    assert router.pick(key, 100) != stalled


def test_one_that_fails_often_gets_less_than_those_that_never_do() -> None:
    router, clock = encoders(4)
    bad, *good = router.endpoints
    for _ in range(10):
        for endpoint_ in good:
            router.succeeded(endpoint_)
        router.failed(bad)
        clock.now += 0.01
    router.succeeded(bad)  # it is there again, for now
    chosen = []
    for index in range(400):
        found = router.pick(digest(index), 100)
        chosen.append(found.address)
        router.book(found, digest(index), 100)
    assert 20 < chosen.count(bad.address) < 80


def test_a_decoder_that_fails_now_and_then_is_nobodys_first_choice_for_a_while() -> None:
    clock = Clock()
    router = DecoderRouter(clock=clock)
    for name in ("d0", "d1"):
        router.join(endpoint(name))
    prefix = next(digest(i) for i in range(99) if router.pick(digest(i), tokens=9).address == "d0")
    router.failed(router.endpoints[0])
    clock.now += FIRST_BACK_OFF_S + 0.1
    assert router.pick(prefix, tokens=9).address == "d1"
    clock.now += 3 * HALF_LIFE_S
    assert router.pick(prefix, tokens=9).address == "d0"


def test_what_overflows_from_one_decoder_goes_to_the_same_next_one() -> None:
    clock = Clock()
    router = DecoderRouter(clock=clock)
    for index in range(5):
        router.join(endpoint(f"d{index}"))
    owner = router.pick(digest(1), tokens=10)
    busy = router.charge(owner.address, 10**6)
    found = {router.pick(digest(1), tokens=10).address for _ in range(10)}
    assert len(found) == 1
    assert owner.address not in found
    (third, *_) = (e.address for e in router.endpoints if e != owner and e.address not in found)
    other = router.charge(third, 500)
    assert {router.pick(digest(1), tokens=10).address} == found  # a little load moves nothing
    for charge in (busy, other):
        charge.release()
    assert router.pick(digest(1), tokens=10) == owner


def test_of_a_large_fleet_few_are_weighed_and_few_keys_move() -> None:
    router, _ = encoders(300)
    before = {i: router.pick(mixed(i), 10) for i in range(3000)}
    shares = Counter(e.address for e in before.values())
    assert len(shares) > 280
    assert max(shares.values()) < 60
    gone = router.pick(mixed(1), 10).address
    router.leave(gone)
    after = {i: router.pick(mixed(i), 10) for i in before}
    moved = [i for i in before if before[i] != after[i]]
    assert all(i in moved for i in before if before[i].address == gone)
    assert len(moved) < shares[gone] + 60
    router.join(endpoint(gone))
    assert {i: router.pick(mixed(i), 10) for i in before} == before
    for seat in router.endpoints[:250]:  # all that are near some keys fail: others are found
        for _ in range(3):
            router.failed(seat)
    assert all(router.pick(mixed(i), 10) in router.endpoints[250:] for i in range(100))
    router.check()


def mixed(index: int) -> bytes:
    return hashlib.sha256(b"%d" % index).digest()


def test_another_epoch_is_another_process() -> None:
    router, _ = encoders(1)
    old = router.endpoints[0]
    router.failed(old)
    router.join(endpoint("e0", epoch=2))
    assert router.pick(digest(1), 1, exclude=[old]).epoch == 2
    router.failed(old)  # late news about the old one
    assert router.pick(digest(1), 1).epoch == 2


def test_advice_counts_while_fresh_and_draining_encoders_get_nothing() -> None:
    router, clock = encoders(2)
    owner = router.pick(digest(1), 10)
    router.advise(owner.address, Advice(10**6))
    assert router.pick(digest(1), 10) != owner
    clock.now += MAX_AGE_S + 1
    assert router.pick(digest(1), 10) == owner
    router.advise(owner.address, Advice(0, draining=True))
    assert router.pick(digest(1), 10) != owner


def test_only_fitting_encoders_of_one_tower() -> None:
    router, _ = encoders(2)
    router.join(endpoint("other", tower=b"u"))
    router.join(endpoint("wide", rows=RowFormat(16, 1, "float32")))
    decoder = endpoint("d", tower=b"")
    assert router.tower_for(decoder) == b"t"
    for index in range(50):
        found = router.pick(digest(index), 1, fits=decoder, tower=b"t")
        assert found.address in ("e0", "e1")
    assert router.tower_for(endpoint("d", rows=RowFormat(32, 1, "float32"))) is None
    assert router.pick(digest(1), 1, fits=endpoint("d", tower=b"v")) is None


def test_runs_follow_workers_and_their_limits() -> None:
    router, _ = encoders(3)
    d = endpoint("d")
    assert router.num_runs(RUN_PATCHES - 1, fits=d, tower=b"t") == 1
    assert router.num_runs(2 * RUN_PATCHES, fits=d, tower=b"t") == 2
    assert router.num_runs(50 * RUN_PATCHES, fits=d, tower=b"t") == 3
    router.join(dataclasses.replace(endpoint("small"), max_item_patches=RUN_PATCHES))
    assert router.num_runs(50 * RUN_PATCHES, fits=d, tower=b"t") == 50
    assert router.num_runs(50 * RUN_PATCHES, fits=d, tower=b"u") == 1


def test_decoders_by_prefix_until_too_busy() -> None:
    router = DecoderRouter(clock=Clock())
    for name in ("d0", "d1", "d2"):
        router.join(endpoint(name))
    key = prefix_key(b"", range(1000), [])
    owner = router.pick(key, tokens=1000)
    assert all(router.pick(key, tokens=1000) == owner for _ in range(10))
    charge = router.charge(owner.address, 50_000)
    other = router.pick(key, tokens=1000)
    assert other != owner
    assert router.pick(key, tokens=1000, exclude=[other]) not in (other, None)
    charge.release()
    assert router.pick(key, tokens=1000) == owner
    router.advise(owner.address, Advice(0, usage=1.0))
    assert router.pick(key, tokens=1000) != owner
    router.check()


def test_prefix_keys() -> None:
    same = prefix_key(b"s", range(300), [(5, b"a")])
    assert same == prefix_key(b"s", range(1000), [(5, b"a"), (700, b"z")])
    assert same != prefix_key(b"u", range(300), [(5, b"a")])
    assert same != prefix_key(b"s", range(300), [(5, b"b")])
    assert same != prefix_key(b"s", range(1, 300), [(5, b"a")])


class Routing(RuleBasedStateMachine):
    """Whatever happens, charges come back to nothing and an open seat is found."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.clock = encoders(0)
        self.charges: list[Charge] = []

    @rule(name=st.sampled_from("abcd"), epoch=st.integers(1, 3))
    def join(self, name: str, epoch: int) -> None:
        self.router.join(endpoint(name, epoch=epoch))

    @rule(name=st.sampled_from("abcd"))
    def leave(self, name: str) -> None:
        self.router.leave(name)

    @precondition(lambda self: self.router.endpoints)
    @rule(item=st.integers(0, 5), patches=st.integers(1, 1000), fails=st.booleans())
    def work(self, item: int, patches: int, fails: bool) -> None:
        found = self.router.pick(digest(item), patches)
        if found is None:
            return
        assert found in self.router.endpoints
        self.charges.append(self.router.book(found, digest(item), patches))
        (self.router.failed if fails else self.router.succeeded)(found)

    @precondition(lambda self: self.charges)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        charge = self.charges.pop(data.draw(st.integers(0, len(self.charges) - 1)))
        charge.release()
        charge.release()

    @rule(seconds=st.floats(0, 60))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def holds(self) -> None:
        self.router.check()

    def teardown(self) -> None:
        for charge in self.charges:
            charge.release()
        self.router.check()
        self.clock.now += 1000
        if self.router.endpoints:
            assert self.router.pick(digest(9), 1) is not None


TestRouting = Routing.TestCase
TestRouting.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_one_loss_is_forgiven_and_flapping_is_not() -> None:
    router, clock = encoders(2)
    mine = next(i for i in range(99) if router.pick(digest(i), 1).address == "e0")

    def chosen() -> bool:
        return router.pick(digest(mine), 1).address == "e0"

    def bounce() -> None:
        router.lost("e0")
        router.join(endpoint("e0", epoch=int(clock.now * 1000)))

    bounce()
    assert chosen()
    waits = []
    for _ in range(6):
        bounce()
        began = clock.now
        assert not chosen()
        while not chosen():
            clock.now += 0.25
        waits.append(clock.now - began)
    assert waits == sorted(waits) and waits[0] < 2 and max(waits) <= MAX_FLAP_BACK_OFF_S
    bounce()
    router.leave("e1")
    assert chosen()  # there is no other
    clock.now += FLAP_S
    bounce()
    router.join(endpoint("e1"))
    assert chosen()
    router.check()


def test_an_encoder_that_makes_no_rows_is_ejected_but_not_for_one_bad_picture() -> None:
    router, clock = encoders(1)
    (only,) = router.endpoints
    for _ in range(MAX_DOUBTS - 1):
        router.doubted(only)
    assert router.pick(digest(0), 1)
    router.succeeded(only)
    for _ in range(MAX_DOUBTS):
        assert router.pick(digest(0), 1)
        router.doubted(only)
    assert router.pick(digest(0), 1) is None
    clock.now += FIRST_BACK_OFF_S
    assert router.pick(digest(0), 1)
