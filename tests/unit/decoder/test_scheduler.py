"""Policy without tensors: order, chunks, pages, preemption, sharing, and that nobody starves."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from decoder_svc.engine.messages import AbortRequest, ItemReleased, StepPlan, StopChoice
from decoder_svc.engine.request import PRIORITY_STEP
from decoder_svc.runner.rows import columns_of
from tests.unit.decoder.simulation import (
    Picture,
    SimulatedRanks,
    Simulation,
    expected,
    make_request,
)

TEXT = list(range(20, 60))


def test_a_request_is_answered() -> None:
    sim = Simulation()
    add = make_request("a", TEXT[:10], max_tokens=6)
    sim.add(add)
    sim.run()
    assert sim.told["a"].tokens() == expected(add)
    done = sim.told["a"].done
    assert done is not None
    assert (done.prompt_tokens, done.completion_tokens, done.cached_tokens) == (10, 6, 0)
    sim.settle()


def test_a_long_prompt_does_not_hold_up_decoding() -> None:
    sim = Simulation(chunk_tokens=4, num_blocks=64)
    sim.add(make_request("short", TEXT[:3], max_tokens=10))
    sim.step()
    sim.add(make_request("long", TEXT, max_tokens=1))
    before = len(sim.told["short"].tokens())
    for turn in range(1, 6):
        sim.step()
        assert len(sim.told["short"].tokens()) == before + turn


def test_the_prompt_budget_is_one_over_all_requests() -> None:
    sim = Simulation(chunk_tokens=8, prefix=False)
    for name in "abc":
        sim.add(make_request(name, TEXT[:6], max_tokens=1))
    sim.step()  # 6 of a, 2 of b
    assert [sim.told[name].over for name in "abc"] == [True, False, False]
    sim.step()  # 4 of b, 4 of c
    assert [sim.told[name].over for name in "abc"] == [True, True, False]
    sim.step()
    assert sim.told["c"].over


def test_higher_priority_goes_first_then_earlier_arrival() -> None:
    sim = Simulation(chunk_tokens=4, max_running=1, prefix=False)
    for name, priority in (("first", 0), ("second", 0), ("urgent", 5)):
        sim.add(make_request(name, TEXT[:4], max_tokens=1, priority=priority))
    order = []
    for _ in range(3):
        sim.step()
        order += [name for name, told in sim.told.items() if told.over and name not in order]
    assert order == ["urgent", "first", "second"]


def test_urgent_requests_that_keep_coming_starve_nobody() -> None:
    sim = Simulation(max_running=1, prefix=False)
    sim.add(make_request("busy", TEXT[:4], max_tokens=3))
    sim.step()
    sim.add(make_request("patient", TEXT[:4], max_tokens=1))
    for index in range(2 * PRIORITY_STEP):
        sim.add(make_request(f"urgent {index}", TEXT[:4], max_tokens=1, priority=1))
        sim.step()
    num_overtook = sum(told.over for told in sim.told.values()) - 2
    assert sim.told["patient"].over
    assert not sim.told[f"urgent {2 * PRIORITY_STEP - 1}"].over
    assert num_overtook > PRIORITY_STEP


def test_no_more_sequences_run_than_allowed() -> None:
    sim = Simulation(max_running=3)
    for index in range(6):
        sim.add(make_request(str(index), TEXT[:4], max_tokens=5, n=1 + index % 3))
    while not all(told.over for told in sim.told.values()):
        sim.step()
        assert sim.load.running <= 3
    for index in range(6):
        for choice in range(1 + index % 3):
            add = make_request(str(index), TEXT[:4], max_tokens=5)
            assert sim.told[str(index)].tokens(choice) == expected(add, choice)


def test_text_runs_while_a_picture_is_still_encoded() -> None:
    sim = Simulation(lag=8)
    sim.add(make_request("picture", [*TEXT[:6], Picture("p", 8), 7], max_tokens=2))
    sim.add(make_request("text", TEXT[:5], max_tokens=3))
    for _ in range(4):
        sim.step()
    assert sim.told["text"].over and not sim.told["picture"].over
    sim.run()
    sim.settle()


def test_an_item_is_released_once_and_says_where_it_came_from() -> None:
    sim = Simulation(block_size=2)
    for name in "ab":
        sim.add(make_request(name, [20, Picture("p", 5), 21, 22, 23]))
        sim.run()
    released = [
        [event for event in sim.told[name].events if isinstance(event, ItemReleased)]
        for name in "ab"
    ]
    assert released == [[ItemReleased(0, False)], [ItemReleased(0, True)]]


def test_the_newest_gives_way_when_pages_run_out() -> None:
    sim = Simulation(num_blocks=8, block_size=2, prefix=False)
    adds = [make_request(name, TEXT[:4], max_tokens=10) for name in "ab"]
    for add in adds:
        sim.add(add)
    sim.run()
    assert sim.metrics.preemptions._value.get() > 0
    first, second = (len(sim.told[name].events) for name in "ab")
    assert [sim.told[add.request_id].tokens() for add in adds] == [expected(a) for a in adds]
    assert first == second
    sim.settle()


@pytest.mark.parametrize(
    ("num_texts", "steps"), [(5, 1), (8, 2)], ids=["short: with the rows", "long: before them"]
)
def test_text_before_missing_rows_waits_only_if_it_is_short(num_texts: int, steps: int) -> None:
    sim = Simulation(lag=4, least_text=8)
    add = make_request("a", [*TEXT[:num_texts], Picture("p", 3), *TEXT[:2]], max_tokens=1)
    sim.add(add)
    sim.run()
    assert sim.told["a"].tokens() == expected(add)
    assert sim.ranks.num_steps == steps
    sim.settle()


def test_a_prompt_that_just_fits_the_pool_is_answered() -> None:
    sim = Simulation(num_blocks=4, block_size=4, chunk_tokens=100)
    add = make_request("a", TEXT[:15], max_tokens=1)
    sim.add(add)
    sim.run()
    assert sim.told["a"].tokens() == expected(add)


def test_choices_prefill_their_prompt_once() -> None:
    sim = Simulation(prefix=False, chunk_tokens=100, num_blocks=100)
    sim.add(make_request("a", TEXT[:32], max_tokens=1, n=4))
    sim.step()
    held = sim.blocks.num_held
    assert held == 7  # 28 shareable tokens; the leader has finished and let go of its tail
    sim.run()
    assert sim.ranks.num_steps == 2


def test_stopping_a_choice_leaves_its_siblings() -> None:
    sim = Simulation()
    add = make_request("a", TEXT[:9], max_tokens=8, n=3)
    sim.add(add)
    for _ in range(3):
        sim.step()
    sim.mailbox.put(StopChoice("a", 0))
    sim.mailbox.put(StopChoice("a", 7))  # no such choice
    sim.run()
    assert sim.told["a"].tokens(1) == expected(add, 1)
    assert sim.told["a"].tokens(2) == expected(add, 2)
    assert len(sim.told["a"].tokens(0)) < 8
    sim.settle()


def test_stopping_the_leader_before_it_has_prefilled() -> None:
    sim = Simulation(chunk_tokens=4)
    add = make_request("a", TEXT[:20], max_tokens=3, n=2)
    sim.add(add)
    sim.step()
    sim.mailbox.put(StopChoice("a", 0))
    sim.run()
    assert sim.told["a"].tokens(0) == []
    assert sim.told["a"].tokens(1) == expected(add, 1)


def test_a_choice_that_takes_the_seat_of_a_stopped_one_gets_none_of_its_tokens() -> None:
    sim = Simulation(ahead=True, most_rows=8, max_running=3)
    sim.add(make_request("a", TEXT[:5], max_tokens=20))
    for _ in range(3):
        sim.step()
    add = make_request("b", TEXT[:9], max_tokens=6, n=2)
    sim.add(add)
    sim.step()  # a decodes beside the prompt of b, in a step that is not back yet
    sim.mailbox.put(StopChoice("a", 0))
    before = sim.told["a"].tokens()
    sim.step()  # it is: the second choice of b joins, in the seat of a
    assert sim.load.running == 2 and sim.told["a"].over
    sim.run()
    assert [sim.told["b"].tokens(choice) for choice in (0, 1)] == [
        expected(add, 0),
        expected(add, 1),
    ]
    assert sim.told["a"].tokens() == before
    sim.settle()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_aborts_leave_nothing_behind(depth: int, ahead: bool) -> None:
    sim = Simulation(depth=depth, ahead=ahead, most_rows=8 * ahead, lag=2)
    for turn in range(12):
        name = str(turn)
        sim.add(make_request(name, [20, Picture(name, 7), *TEXT[:5]], max_tokens=20, n=2))
        for _ in range(turn % 5):
            sim.step()
        sim.mailbox.put(AbortRequest(name))
    sim.told.clear()
    sim.settle()


def test_a_pipeline_is_kept_full() -> None:
    sim = Simulation(depth=3, chunk_tokens=4)
    adds = [make_request(str(i), TEXT[i : i + 6], max_tokens=9) for i in range(6)]
    for add in adds:
        sim.add(add)
    deepest = 0
    while not all(told.over for told in sim.told.values()):
        sim.step()
        deepest = max(deepest, len(sim.core._pipeline))
    assert deepest == 2  # one of three is collected in each turn
    for add in adds:
        assert sim.told[add.request_id].tokens() == expected(add)


PICTURES = [Picture("p", 3), Picture("q", 7), Picture("r", 12)]
pieces = st.one_of(st.integers(20, 23), st.sampled_from(PICTURES))


@st.composite
def requests(draw: st.DrawFn) -> dict[str, object]:
    return {
        "prompt": draw(st.lists(pieces, min_size=1, max_size=10)),
        "max_tokens": draw(st.integers(1, 8)),
        "n": draw(st.integers(1, 3)),
        "priority": draw(st.integers(0, 1)),
        "part_rows": draw(st.sampled_from([None, 2, 5])),
    }


@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking takes minutes
)
@given(data=st.data())
def test_whatever_comes_everyone_is_answered_rightly(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([1, 2, 4, 8]), "block_size")
    adds = [
        make_request(f"r{i}", **fields)  # type: ignore[arg-type]
        for i, fields in enumerate(data.draw(st.lists(requests(), min_size=1, max_size=7)))
    ]
    longest = max(len(a.prompt_ids) + a.sampling.max_tokens for a in adds)
    extra = data.draw(st.integers(0, 12), "extra pages")
    sim = Simulation(
        num_blocks=-(-longest // block_size) + extra,
        block_size=block_size,
        chunk_tokens=data.draw(st.integers(1, 20), "chunk"),
        max_running=data.draw(st.integers(3, 8), "running"),
        prefix=data.draw(st.booleans(), "prefix"),
        depth=data.draw(st.integers(1, 3), "depth"),
        ahead=data.draw(st.booleans(), "ahead"),
        most_rows=data.draw(st.sampled_from([0, 2, 8]), "rows"),
        mixed_tokens=data.draw(st.sampled_from([0, 1, 6, 12]), "mixed"),
        prefill_delay=data.draw(st.integers(0, 4), "delay"),
        slab_pages=2 * (block_size + 1) + data.draw(st.integers(0, 8), "more slab pages"),
        page_rows=data.draw(st.integers(1, 4), "page rows"),
        segment_rows=data.draw(st.integers(1, 8), "segment rows"),
        lag=data.draw(st.integers(0, 3), "lag"),
        least_text=data.draw(st.integers(1, 12), "least text"),
    )
    aborted, stopped = set(), set()
    for add in adds:
        sim.add(add)
        for _ in range(data.draw(st.integers(0, 4), "steps")):
            sim.step()
        heard = [a for a in adds if a.request_id in sim.told and sim.told[a.request_id].tokens()]
        if heard and data.draw(st.integers(0, 2), "stop") == 0:
            stopped.add((data.draw(st.sampled_from(heard), "whom").request_id, 0))
            for name, choice in stopped:
                sim.mailbox.put(StopChoice(name, choice))
        if data.draw(st.integers(0, 5), "abort") == 0:
            aborted.add(add.request_id)
            sim.mailbox.put(AbortRequest(add.request_id))
            sim.step()
    told = dict(sim.told)
    sim.told = {name: t for name, t in told.items() if name not in aborted}
    sim.run()
    sim.told = told
    for add in adds:
        if add.request_id not in aborted:
            for choice in range(add.sampling.n):
                tokens = told[add.request_id].tokens(choice)
                wanted = expected(add, choice)
                if (add.request_id, choice) in stopped:
                    wanted = wanted[: len(tokens)]
                assert tokens == wanted
    sim.settle()


def test_steady_decoding_is_told_in_columns() -> None:
    sim = Simulation(ahead=True, most_rows=8)
    adds = [make_request(str(i), TEXT[i : i + 6], max_tokens=30) for i in range(6)]
    for add in adds:
        sim.add(add)
    sim.run()
    assert isinstance(sim.ranks, SimulatedRanks)
    assert sim.ranks.num_in_columns > 0.8 * sim.ranks.num_steps
    for add in adds:
        assert sim.told[add.request_id].tokens() == expected(add)


def mixed_steps(monkeypatch: pytest.MonkeyPatch, *, delay: int, seats: int) -> list[int]:
    """Tokens of the steps that had both decoding sequences and prompts, of twelve requests."""
    sim = Simulation(
        ahead=True,
        most_rows=8,
        max_running=seats,
        num_blocks=256,
        chunk_tokens=64,
        mixed_tokens=32,
        prefill_delay=delay,
    )
    found = []
    submit = sim.ranks.submit

    def look(plan: StepPlan) -> None:
        if plan.decodes is not None and plan.sequences:
            tokens = sum(len(s.token_ids) for s in plan.sequences)
            found.append(columns_of(plan.decodes).shape[1] + tokens)
        submit(plan)

    monkeypatch.setattr(sim.ranks, "submit", look)
    adds = [make_request(str(i), [20 + i, *TEXT[: i % 5 + 6]], max_tokens=5 + i) for i in range(12)]
    for add in adds:
        sim.add(add)
    sim.run()
    for add in adds:
        assert sim.told[add.request_id].tokens() == expected(add)
    return found


def test_prompts_wait_for_each_other_while_seats_are_scarce(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_once = mixed_steps(monkeypatch, delay=0, seats=4)
    together = mixed_steps(monkeypatch, delay=3, seats=4)
    assert len(together) < len(at_once)
    assert max(at_once + together) <= 32
    enough = mixed_steps(monkeypatch, delay=0, seats=12)
    assert enough and mixed_steps(monkeypatch, delay=3, seats=12) == enough  # no seat is scarce
