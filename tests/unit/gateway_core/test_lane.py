"""Turns before the gateway's slots: bounded, fair, nobody lost and nobody counted twice."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from chiasm.errors import ResourceExhausted
from gateway.lane import Lane

LONG_S = 60.0


def lane(capacity: int = 1, max_waiting: int = 100) -> Lane:
    return Lane(capacity, max_waiting=max_waiting)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_tenants_take_turns_however_many_each_sends() -> None:
    turns, order = lane(), []
    await turns.enter("first", within_s=LONG_S)

    async def request(tenant: str, number: int) -> None:
        await turns.enter(tenant, within_s=LONG_S)
        order.append(f"{tenant}{number}")
        await settle()
        turns.leave()

    greedy = [asyncio.create_task(request("a", n)) for n in range(4)]
    await settle()
    modest = [asyncio.create_task(request(t, n)) for t in "bc" for n in range(2)]
    await settle()
    assert turns.waiting == 8
    turns.leave()
    await asyncio.gather(*greedy, *modest)
    assert order == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "a3"]
    assert turns.inside == turns.waiting == 0


async def test_a_full_line_and_a_long_wait_are_refused_with_a_hint() -> None:
    turns = lane(max_waiting=1)
    await turns.enter("a", within_s=LONG_S)
    waiting = asyncio.create_task(turns.enter("a", within_s=LONG_S))
    await settle()
    with pytest.raises(ResourceExhausted) as full:
        await turns.enter("b", within_s=LONG_S)
    waiting.cancel()
    await settle()
    with pytest.raises(ResourceExhausted) as late:
        await turns.enter("a", within_s=0.05)
    for refusal in (full.value, late.value):
        assert refusal.retry_after_s is not None
        assert 1 <= refusal.retry_after_s <= 60
    assert turns.waiting == 0
    turns.leave()
    await turns.enter("b", within_s=0.0)  # no wait is needed
    turns.check()


async def test_who_goes_away_in_line_gives_up_the_place() -> None:
    turns = lane()
    await turns.enter("a", within_s=LONG_S)
    gone = asyncio.create_task(turns.enter("a", within_s=LONG_S))
    stays = asyncio.create_task(turns.enter("b", within_s=LONG_S))
    await settle()
    gone.cancel()
    await settle()
    turns.leave()
    await stays
    assert turns.inside == 1
    # Cancelled in the very moment of getting the turn: it goes to the next.
    gone = asyncio.create_task(turns.enter("a", within_s=LONG_S))
    last = asyncio.create_task(turns.enter("b", within_s=LONG_S))
    await settle()
    turns.leave()
    gone.cancel()
    await last
    assert gone.cancelled()
    assert (turns.inside, turns.waiting) == (1, 0)


async def test_large_ones_are_not_overtaken_for_ever_and_enter_alone() -> None:
    turns = lane(capacity=10)
    small = await turns.enter("a", weight=3, within_s=LONG_S)
    large = asyncio.create_task(turns.enter("b", weight=1000, within_s=LONG_S))
    await settle()
    later = asyncio.create_task(turns.enter("c", weight=1, within_s=LONG_S))
    await settle()
    assert not large.done() and not later.done()
    turns.leave(small)
    assert await large == 10
    assert not later.done()
    turns.leave(10)
    assert await later == 1


async def test_a_service_that_is_full_narrows_the_lane_until_somebody_is_done() -> None:
    turns = lane(capacity=100)
    for _ in range(10):
        await turns.enter("a", within_s=LONG_S)
    turns.leave(refused=True)  # nine are inside, and that is as many as there is room for
    again = asyncio.create_task(turns.enter("a", within_s=LONG_S, first=True))
    others = [asyncio.create_task(turns.enter("a", within_s=LONG_S)) for _ in range(5)]
    await settle()
    assert turns.inside == 9
    turns.leave()  # one answered: room for it, and for one more to find out
    await settle()
    assert again.done()
    assert turns.inside == 10
    for _ in range(9):
        turns.leave()
    await settle()
    assert all(task.done() for task in others)
    turns.check()


@given(st.integers(0, 2**32), st.integers(1, 5))
@settings(max_examples=50, deadline=None, phases=(Phase.generate,))
def test_any_history_ends_with_nobody_inside(seed: int, capacity: int) -> None:
    draw = random.Random(seed)

    async def history() -> None:
        turns = lane(capacity=capacity, max_waiting=8)
        most = 0

        async def request() -> None:
            nonlocal most
            weight = await turns.enter(
                draw.randrange(3), within_s=LONG_S, weight=draw.randint(1, 3)
            )
            most = max(most, turns.inside)
            try:
                for _ in range(draw.randrange(4)):
                    await asyncio.sleep(0)
            finally:
                turns.leave(weight, refused=draw.random() < 0.2)

        tasks = set()
        for _ in range(40):
            tasks.add(asyncio.create_task(request()))
            if draw.random() < 0.3:
                draw.choice(sorted(tasks, key=id)).cancel()
            if draw.random() < 0.5:
                await asyncio.sleep(0)
                turns.check()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        refused = (ResourceExhausted, asyncio.CancelledError)
        assert all(end is None or isinstance(end, refused) for end in ends)
        assert (turns.inside, turns.waiting) == (0, 0)
        assert most <= capacity
        turns.check()

    asyncio.run(history())
