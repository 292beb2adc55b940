"""The transfer contract under every order of events: real store, sessions and receivers, no clock.

Each example is a string of bytes that chooses, step by step, what happens next in a world of two
encoders, two decoders and one gateway: messages of different streams overtake each other, streams
break, encoders die and come back, requests are aborted, preempted, redirected and hedged, stores
and slabs are too small. After every step both sides check themselves; every row written and
consumed is compared with what it must be; at the end everything must have come to rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract.transfer_model.decoder_host import PAGE_ROWS, PAGES
from tests.contract.transfer_model.memory import NixlMemory, Writer
from tests.contract.transfer_model.scripts import scripts
from tests.contract.transfer_model.world import World


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(
    max_examples=2000,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.binary(min_size=40, max_size=160))
def test_nothing_is_mixed_up_leaked_or_waits_for_ever(script: bytes) -> None:
    World().run(script)


@pytest.fixture(scope="module")
def nixl_memory() -> Iterator[Callable[[str], NixlMemory]]:
    """Memory of the two decoders that one agent writes to: real transfers, the same every time."""
    writer = Writer()
    memories = {name: NixlMemory(PAGES * PAGE_ROWS, writer) for name in ("d", "e")}
    yield memories.__getitem__
    for agent in (writer.agent, *(memory.agent for memory in memories.values())):
        agent.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_same_over_nixl(nixl_memory: Callable[[str], NixlMemory]) -> None:
    """2,000 histories in which every row is written by a transfer of its own.

    They end as they do where rows are only named; no memory is ever found wrong, nobody waits for
    ever.
    """
    for script in scripts(10_000, 2000):
        assert ending(World(nixl_memory, refusals=True), script) == ending(
            World(refusals=True), script
        )


def ending(world: World, script: bytes) -> dict[str, str]:
    world.run(script)
    return {job.request_id: str(job.outcome) for job in world.gateway.jobs.values()}


def test_a_preempted_request_that_comes_back_is_ahead_again() -> None:
    """Histories in which it once waited for pages that a younger one held."""
    for seed in (964, 1431, 1514, 2128):
        (script,) = scripts(seed, 1)
        World().run(script)


def test_the_model_reaches_writes_that_fail() -> None:
    seen: set[str] = set()
    for script in scripts(10_000, 60):
        world = World(refusals=True)
        world.run(script)
        seen |= world.seen
    assert "switched" in seen


def test_the_model_reaches_what_it_is_for() -> None:
    """A property over states that are never reached would prove nothing."""
    seen: set[str] = set()
    for script in scripts(0, 60):
        world = World()
        world.run(script)
        seen |= world.seen
    assert seen >= {
        "finished",
        "aborted",
        "recalled",
        "refused",
        "quarantined",
        "late write",
        "hedged",
        "granted ahead",
        "stale attempt",
        "restarted",
        "shared",
    }
