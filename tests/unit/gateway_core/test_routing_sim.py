"""The router over simulated replicas that are slow, die and come back. No network, no waiting."""

from __future__ import annotations

import pytest

from bench.routing_sim import BUSY, Outcome, Setting, Simulation


def mean_ms(outcome: Outcome) -> float:
    return sum(outcome.waits_s) / len(outcome.waits_s) * 1e3


@pytest.mark.parametrize("seed", [1, 2])
def test_content_load_and_failures_together_beat_each_alone(seed: int) -> None:
    setting = Setting("busy", 20, 2000, seed, **BUSY)
    found = {
        policy: Simulation(setting, policy).run()
        for policy in ("random", "least loaded", "consistent hash", "ours")
    }
    ours = found.pop("ours")
    assert ours.lost == 0
    assert all(mean_ms(ours) < mean_ms(other) for other in found.values())
    assert ours.hits > 2 * found["least loaded"].hits


def test_nothing_is_lost_while_half_of_the_fleet_dies_in_turn() -> None:
    setting = Setting("dying", 10, 1500, deaths=30, down_s=2.0)
    assert Simulation(setting, "ours").run().lost == 0
