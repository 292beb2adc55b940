"""One bad request, rank, number or encoder fails that request; the engine lives on."""

from __future__ import annotations

import pytest

from chiasm.errors import EmbeddingLost, Internal
from chiasm.plan import Cause, Span
from decoder_svc.embeddings.events import Failed, Ready
from decoder_svc.engine.messages import (
    ChoiceDone,
    FinishReason,
    PartFailed,
    RedirectPart,
    StopChoice,
)
from tests.unit.decoder.simulation import (
    ROWS,
    SOURCE,
    Picture,
    Simulation,
    expected,
    make_request,
)

TEXT = list(range(20, 60))


@pytest.mark.parametrize("depth", [1, 3])
def test_a_failing_step_fails_its_requests_only(depth: int) -> None:
    sim = Simulation(max_running=1, depth=depth)
    sim.ranks.fail_on = {"bad"}
    adds = [make_request(name, TEXT[:6]) for name in ("before", "bad", "after")]
    for add in adds:
        sim.add(add)
    sim.run()
    assert isinstance(sim.told["bad"].failed, Internal)
    assert "rank" not in str(sim.told["bad"].failed)  # nothing of the inside goes out
    for add in (adds[0], adds[2]):
        assert sim.told[add.request_id].tokens() == expected(add)
    assert sim.metrics.step_failures._value.get() == 1
    sim.settle()


def test_logits_that_are_not_finite_fail_one_request_of_the_batch() -> None:
    sim = Simulation()
    sim.ranks.nan_on = {"bad"}
    adds = [make_request(name, TEXT[:6], n=2) for name in ("a", "bad", "b")]
    for add in adds:
        sim.add(add)
    sim.run()
    assert isinstance(sim.told["bad"].failed, Internal)
    assert sim.metrics.nonfinite_logits._value.get() == 1
    for add in (adds[0], adds[2]):
        assert sim.told[add.request_id].tokens(1) == expected(add, 1)
    sim.settle()


def test_a_request_the_receiver_chokes_on_is_the_only_one_to_fail() -> None:
    sim = Simulation()
    good = make_request("good", TEXT[:6], max_tokens=8)
    sim.add(good)
    sim.step()
    twice = make_request("twice", [20, Picture("p", 3), 21], max_tokens=8)
    sim.receiver.add("twice", twice.promises)  # the receiver knows this id already
    sim.add(twice)
    late = make_request("late", TEXT[3:9])
    sim.add(late)  # in the same turn, behind it
    sim.run()
    assert sim.told["late"].tokens() == expected(late)
    assert isinstance(sim.told["twice"].failed, Internal)
    assert sim.told["good"].tokens() == expected(good)
    sim.settle()


def test_rows_that_never_come_end_in_a_timeout() -> None:
    sim = Simulation(timeout_s=5.0)
    sim.silent = True
    sim.add(make_request("media", [20, Picture("p", 3), 21]))
    sim.add(make_request("text", TEXT[:4]))
    for _ in range(20):
        sim.step()
    assert sim.told["text"].over and not sim.told["media"].over
    sim.now += 6.0
    sim.step()
    error = sim.told["media"].failed
    assert isinstance(error, EmbeddingLost) and "TIMEOUT" in error.message
    sim.settle()


def test_a_choice_that_still_waits_for_rows_is_timed_once_its_sibling_gave_way() -> None:
    sim = Simulation(num_blocks=5, block_size=4, prefix=False, timeout_s=5.0)
    sim.silent = True
    sim.add(make_request("old", TEXT[:6], max_tokens=12))
    sim.step()
    sim.add(make_request("media", [*TEXT[:6], Picture("p", 1)], n=2))
    while not sim.metrics.preemptions._value.get():
        sim.step()
    sim.step()
    assert (sim.load.running, sim.load.waiting) == (2, 1)
    sim.now += 6.0
    sim.step()
    assert isinstance(sim.told["media"].failed, EmbeddingLost)
    assert not sim.told["old"].over
    sim.run()
    sim.settle()


def test_a_stopped_choice_that_waited_for_rows_does_not_time_its_siblings() -> None:
    sim = Simulation(num_blocks=11, block_size=4, prefix=False, timeout_s=5.0)
    sim.add(make_request("old", TEXT[:6], max_tokens=12))
    sim.step()
    add = make_request("media", [*TEXT[:6], Picture("p", 1)], n=2, max_tokens=30)
    sim.add(add)
    while not sim.metrics.preemptions._value.get():
        sim.step()
    sim.silent = True  # when the second choice is back, its row does not come again
    while sim.core._requests["media"].clock.stalled_since is None:
        sim.step()
    sim.mailbox.put(StopChoice("media", 1))
    sim.step()
    sim.now += 6.0
    sim.run()
    assert sim.told["media"].tokens() == expected(add)
    sim.settle()


@pytest.mark.parametrize("rows", [Span(0, 0), Span(0, 2), Span(0, 4), Span(1, 4)])
def test_a_wrong_row_count_is_refused_before_scheduling(rows: Span) -> None:
    sim = Simulation()
    sim.silent = True
    sim.add(make_request("bad", [20, Picture("p", 3), 21]))
    sim.step()
    (fetch_id,) = sim._opened
    sim.mailbox.put(Ready(fetch_id, 0, rows, ROWS))
    for _ in range(5):
        sim.step()
    told = sim.told["bad"]
    if rows == Span(0, 2):  # a first segment; the rest may follow
        assert not told.over
    else:
        assert [e.cause for e in told.events if isinstance(e, PartFailed)] == [Cause.LOST]
    assert told.tokens() == []
    good = make_request("good", TEXT[:6])
    sim.told = {}
    sim.add(good)
    sim.run()
    assert sim.told["good"].tokens() == expected(good)


def test_a_lost_part_goes_on_from_another_encoder() -> None:
    sim = Simulation()
    sim.silent = True
    add = make_request("a", [20, Picture("p", 3), 21])
    sim.add(add)
    sim.step()
    (fetch_id,) = sim._opened
    sim.mailbox.put(Failed(fetch_id, Cause.EVICTED, "gone"))
    sim.step()
    lost = [event for event in sim.told["a"].events if isinstance(event, PartFailed)]
    assert lost == [PartFailed(0, 0, 1, Cause.EVICTED, "gone")]
    sim.silent = False
    sim.mailbox.put(RedirectPart("a", 0, 0, 1, SOURCE))  # stale
    sim.mailbox.put(RedirectPart("a", 5, 0, 2, SOURCE))  # no such item
    sim.mailbox.put(RedirectPart("nobody", 0, 0, 2, SOURCE))
    sim.mailbox.put(RedirectPart("a", 0, 0, 2, SOURCE))
    sim.run()
    assert sim.told["a"].tokens() == expected(add)
    assert sim.metrics.stale_attempts._value.get() == 1


def test_a_replay_that_had_ended_ends_at_once() -> None:
    sim = Simulation()
    add = make_request("a", TEXT[:6], max_tokens=2, n=2, resume=((30, 31), (32,)))
    sim.add(add)
    sim.run()
    told = sim.told["a"]
    assert told.events[0] == ChoiceDone(0, FinishReason.LENGTH)
    assert len(told.tokens(1)) == 1
    assert told.done is not None and told.done.completion_tokens == 4
    sim.settle()
