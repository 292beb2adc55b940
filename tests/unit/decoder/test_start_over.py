"""Ranks die with all their pages; requests, which the engine keeps, do not."""

from __future__ import annotations

import pytest

from chiasm.errors import Internal, Unavailable
from decoder_svc.engine.messages import StepPlan, StepResult
from decoder_svc.runner.executor import RanksLost
from tests.unit.decoder.simulation import (
    Picture,
    SimulatedRanks,
    Simulation,
    expected,
    make_request,
)

TEXT = list(range(20, 60))


class MortalRanks(SimulatedRanks):
    """Ranks that die when told to, or while they compute for somebody; pages die with them."""

    def __init__(self, *, block_size: int, depth: int) -> None:
        super().__init__(block_size=block_size, depth=depth)
        self.alive = True
        self.dying = False
        self.killers: set[str] = set()

    @property
    def ready(self) -> bool:
        return self.alive

    def poll(self) -> None:
        if self.dying:
            self._die()

    def submit(self, plan: StepPlan) -> None:
        assert self.alive, "a step for dead ranks"
        super().submit(plan)

    def collect(self) -> StepResult:
        if self.killers & {s.request_id for s in self._plans[0].sequences}:
            self._die()
        return super().collect()

    def _die(self) -> None:
        self.alive = self.dying = False
        self.num_losses += 1
        self._plans.clear()
        self._pages.clear()  # what reads them without writing first raises
        raise RanksLost("rank 1 has died")


def mortal(depth: int) -> tuple[Simulation, MortalRanks]:
    ranks = MortalRanks(block_size=4, depth=depth)
    return Simulation(depth=depth, num_blocks=96, slab_pages=24, ranks=ranks), ranks


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
def test_everybody_computes_again_what_was_lost(depth: int, steps: int) -> None:
    sim, ranks = mortal(depth)
    adds = [
        make_request("text", TEXT[:9], max_tokens=12),
        make_request("same", TEXT[:9], max_tokens=12),
        make_request("long", TEXT * 2, max_tokens=6),
        make_request("choices", TEXT[5:15], max_tokens=8, n=3),
        make_request("picture", [20, Picture("p", 6), 21, 22], max_tokens=8),
        make_request(
            "wide", [20, Picture("p", 6), Picture("q", 21), 22], max_tokens=8, part_rows=5
        ),
    ]
    for add in adds:
        sim.add(add)
    for _ in range(steps):
        sim.step()
    ranks.dying = True
    for _ in range(4):
        sim.step()
    assert not sim.load.available and sim.load.num_losses == 1 and sim.load.running == 0
    assert len(sim.prefix or ()) == 0 and sim.blocks.num_held == 0
    ranks.alive = True
    sim.run()
    for add in adds:
        for choice in range(add.sampling.n):
            assert sim.told[add.request_id].tokens(choice) == expected(add, choice)
    sim.settle()


def test_what_kills_ranks_again_and_again_is_given_up() -> None:
    sim, ranks = mortal(1)
    ranks.killers = {"bad"}
    sim.add(make_request("bad", TEXT[:6]))
    good = [make_request(f"good{i}", TEXT[i : i + 8], max_tokens=10) for i in range(3)]
    for add in good:
        sim.add(add)
    for _ in range(200):
        sim.step()
        ranks.alive = True
    assert isinstance(sim.told["bad"].failed, Internal)
    assert ranks.num_losses == 3
    late = make_request("late", TEXT[:8])
    sim.add(late)
    sim.run()
    assert sim.told["late"].tokens() == expected(late)


def test_requests_are_handed_back_when_the_ranks_stay_away() -> None:
    sim, ranks = mortal(2)
    sim.add(make_request("a", [20, Picture("p", 6), 21], max_tokens=30))
    sim.add(make_request("b", TEXT[:6], max_tokens=30))
    for _ in range(6):
        sim.step()
    ranks.dying = True
    sim.step()
    sim.now += 59.0
    sim.step()
    assert not sim.told["a"].over
    sim.now += 2.0
    sim.step()
    for name in ("a", "b"):
        error = sim.told[name].failed
        assert isinstance(error, Unavailable) and error.retryable
    ranks.alive = True
    sim.settle()
