"""One bad request, rank, number or encoder fails that request; the engine lives on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chiasm.errors import EmbeddingLost, Internal
from chiasm.plan import Cause, Span
from decoder_svc.embeddings.events import Failed, Ready
from decoder_svc.engine.messages import (
    ChoiceDone,
    FinishReason,
    PartFailed,
    RedirectPart,
    StepResult,
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


@pytest.mark.parametrize("chunk_tokens", [8, 64])
def test_pages_of_numbers_that_are_not_finite_are_never_found(chunk_tokens: int) -> None:
    """Neither those of the step that told it nor those of the chunks before, which told nothing."""
    sim = Simulation(block_size=4, chunk_tokens=chunk_tokens)
    sim.add(make_request("seed", TEXT[:9], max_tokens=1))
    sim.run()
    sim.ranks.nan_on = {"bad"}
    sim.add(make_request("bad", TEXT[:24], n=2))
    sim.run()
    assert isinstance(sim.told["bad"].failed, Internal)
    assert sim.prefix is not None and len(sim.prefix) == 0
    add = make_request("good", TEXT[:24])
    sim.add(add)
    sim.run()
    done = sim.told["good"].done
    assert done is not None and done.cached_tokens == 0
    assert sim.told["good"].tokens() == expected(add)
    sim.settle()


def test_a_page_that_is_not_finite_is_forgotten_with_the_answer_it_was_filled_by() -> None:
    sim = Simulation(block_size=4)
    sim.add(make_request("bad", TEXT[:6], max_tokens=20))
    sim.add(make_request("good", TEXT[10:16], max_tokens=20))
    for _ in range(8):
        sim.step()
    assert sim.prefix is not None
    num_found = len(sim.prefix)
    sim.ranks.nan_on = {"bad"}
    sim.step()
    assert isinstance(sim.told["bad"].failed, Internal)
    assert len(sim.prefix) == num_found // 2
    sim.run()
    sim.settle()


class Planted(Exception):
    """A fault in the engine's own code."""


def raise_once(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    """The next call of a method raises."""
    method = getattr(owner, name)

    def fail(*args: object, **named: object) -> object:
        monkeypatch.setattr(owner, name, method)
        raise Planted

    monkeypatch.setattr(owner, name, fail)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", ["publish", "publish_each", "find", "grow", "grow_each"])
def test_a_fault_in_the_books_fails_who_was_concerned_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, name: str, ahead: bool
) -> None:
    sim = Simulation(ahead=ahead, most_rows=8)
    sim.ranks.most_given_up = sim.ranks.depth
    for index in range(3):
        sim.add(make_request(f"r{index}", TEXT[index : index + 8], max_tokens=12, n=1 + index % 2))
    sim.step()
    raise_once(monkeypatch, sim.scheduler._pages, name)
    sim.add(make_request("late", TEXT[5:15], max_tokens=6))
    sim.run(most=100)
    assert sim.metrics.step_failures._value.get() == 1
    failed = [told.failed for told in sim.told.values() if told.failed is not None]
    assert failed and all(isinstance(error, Internal) for error in failed)
    add = make_request("after", TEXT[:8])
    sim.add(add)
    sim.run()
    assert sim.told["after"].tokens() == expected(add)
    sim.settle()


@pytest.mark.parametrize(
    ("owner", "name"),
    [("scheduler", "demands"), ("receiver", "grant"), ("receiver", "take_commands")],
)
def test_a_step_that_is_planned_and_never_submitted_holds_nothing(
    monkeypatch: pytest.MonkeyPatch, owner: str, name: str
) -> None:
    sim = Simulation(num_blocks=8, max_running=2)
    for index in range(4):  # what is not given back would soon be missed
        sim.add(make_request(f"bad{index}", TEXT[:9], n=2))
        raise_once(monkeypatch, getattr(sim, owner), name)
        sim.run(most=10)
        assert isinstance(sim.told[f"bad{index}"].failed, Internal)
    add = make_request("good", TEXT[:9], n=2)
    sim.add(add)
    sim.run()
    assert sim.told["good"].tokens(1) == expected(add, 1)
    sim.settle()


def test_a_step_that_came_back_short_fails_whoever_was_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sim = Simulation()
    collect = sim.ranks.collect

    def cut() -> StepResult:
        monkeypatch.setattr(sim.ranks, "collect", collect)
        return StepResult(collect().step)

    monkeypatch.setattr(sim.ranks, "collect", cut)
    sim.add(make_request("short", TEXT[:9]))
    sim.run(most=10)
    assert isinstance(sim.told["short"].failed, Internal)
    assert sim.prefix is not None and len(sim.prefix) == 0
    sim.settle()


def test_a_request_that_cannot_be_taken_in_is_told_so() -> None:
    sim = Simulation()
    sim.add(replace(make_request("odd", TEXT[:4]), grid_positions=b"xyz"))
    sim.run(most=3)
    assert isinstance(sim.told["odd"].failed, Internal)
    sim.settle()


@pytest.mark.parametrize(("owner", "name"), [("scheduler", "_settle"), ("pages", "drop")])
def test_an_engine_whose_books_are_wrong_ends_and_its_callers_are_told(
    monkeypatch: pytest.MonkeyPatch, owner: str, name: str
) -> None:
    sim = Simulation()
    sim.add(make_request("a", TEXT[:6], max_tokens=2))
    sim.step()
    owners = {"scheduler": sim.scheduler, "pages": sim.scheduler._pages}
    raise_once(monkeypatch, owners[owner], name)
    with pytest.raises(AssertionError, match="pages held by nobody"):
        for _ in range(3):
            sim.core.step_safely()
    assert isinstance(sim.told["a"].failed, Internal)


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
