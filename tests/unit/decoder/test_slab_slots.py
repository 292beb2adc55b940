"""Rows that have landed hold slots that others may need: who cannot read them gives them back."""

from __future__ import annotations

from decoder_svc.engine.messages import StopChoice
from tests.unit.decoder.simulation import Picture, Simulation, expected, make_request

TEXT = list(range(20, 60))


def test_a_preempted_request_gives_its_landed_rows_slots_back() -> None:
    sim = Simulation(num_blocks=17, block_size=1, chunk_tokens=1, prefix=False, segment_rows=2)
    old = make_request("old", TEXT[:2], max_tokens=12)
    new = make_request("new", [Picture("p", 12), 20], max_tokens=2)
    sim.add(old)
    sim.step()
    sim.add(new)
    was_preempted = False
    while not sim.told["old"].over:
        held_before = sim.receiver.num_free_pages < 16
        sim.step()
        if sim.load.waiting and not was_preempted:
            was_preempted = True
            assert held_before, "nothing had landed: the test shows nothing"
            sim.step()
            assert sim.receiver.num_free_pages == 16
    assert was_preempted
    sim.run()
    assert sim.told["new"].tokens() == expected(new)
    sim.settle()


def test_short_text_behind_landed_rows_does_not_wait_with_them() -> None:
    """Two pictures that together are more than the slab holds: the first must make room."""
    sim = Simulation(slab_pages=2, page_rows=4, least_text=8, segment_rows=4)
    pictures = [Picture("p", 8), 20, Picture("q", 8), 21]
    add = make_request("a", pictures, max_tokens=2)
    sim.add(add)
    sim.run()
    assert sim.told["a"].tokens() == expected(add)
    sim.settle()


def test_who_follows_a_stopped_leader_does_not_sit_on_the_slab_while_it_waits() -> None:
    """Else whoever is served first finds no room for its rows, and never gives up its seats."""
    sim = Simulation(max_running=3, slab_pages=4, page_rows=4)
    adds = [
        make_request("a", [Picture("p", 16), 20], max_tokens=3, n=2),
        make_request("b", [Picture("q", 16), 21], max_tokens=3, n=3, priority=1),
    ]
    sim.add(adds[0])
    sim.step()
    sim.add(adds[1])  # served first, but seats are taken
    sim.step()
    sim.mailbox.put(StopChoice("a", 0))  # behind the word that all its rows have landed
    sim.run(most=60)
    assert [sim.told["a"].tokens(choice) for choice in (0, 1)] == [[], expected(adds[0], 1)]
    for choice in range(3):
        assert sim.told["b"].tokens(choice) == expected(adds[1], choice)
    sim.settle()
