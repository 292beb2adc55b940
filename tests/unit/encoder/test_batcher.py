"""Batching policy: budget, order, turns, look-ahead, cancelling, accounting."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_svc.batcher import Batcher, Ticket


def make(budget: int = 100, workers: int = 2) -> Batcher:
    return Batcher(max_batch_patches=budget, max_preparing=workers)


def prepare_all(batcher: Batcher) -> list[int]:
    """Prepares whatever may be prepared; returns the jobs in the order they were."""
    order = []
    while (ticket := batcher.next_to_prepare()) is not None:
        order.append(ticket.job)
        assert batcher.prepared(ticket)
        batcher.check()
    return order


def jobs(batch: tuple[Ticket, ...]) -> list[int]:
    return [ticket.job for ticket in batch]


def test_first_come_first_served_up_to_the_budget() -> None:
    batcher = make()
    for job, patches in enumerate((40, 50, 20, 5)):
        batcher.add(job, [patches])
    assert prepare_all(batcher) == [0, 1, 2, 3]
    assert jobs(batcher.take_batch()) == [0, 1]  # 20 does not fit, and 5 does not overtake it
    assert jobs(batcher.take_batch()) == [2, 3]
    assert batcher.take_batch() == ()


def test_an_oversize_unit_runs_alone() -> None:
    batcher = make()
    batcher.add(0, [40])
    batcher.add(1, [500])
    batcher.add(2, [40])
    assert prepare_all(batcher) == [0]  # 500 would be more than two batches ahead
    assert jobs(batcher.take_batch()) == [0]
    assert prepare_all(batcher) == [1]
    assert jobs(batcher.take_batch()) == [1]
    prepare_all(batcher)
    assert jobs(batcher.take_batch()) == [2]


def test_units_that_run_alone() -> None:
    """They neither join a batch nor are joined, and nobody overtakes them."""
    batcher = make()
    for job in range(5):
        batcher.add(job, [10], alone=job in (1, 2))
    assert prepare_all(batcher) == [0, 1, 2, 3, 4]
    assert [jobs(batcher.take_batch()) for _ in range(5)] == [[0], [1], [2], [3, 4], []]


def test_higher_priority_goes_first() -> None:
    batcher = make(budget=50)
    for job, priority in enumerate((0, 0, 5)):
        batcher.add(job, [30], priority=priority)
    assert prepare_all(batcher) == [2, 0, 1]
    assert [jobs(batcher.take_batch()) for _ in range(3)] == [[2], [0], [1]]


def test_a_long_clip_takes_turns() -> None:
    batcher = make(budget=60)
    batcher.add(0, [60] * 5)
    batcher.add(1, [10])
    batcher.add(2, [10])
    prepare_all(batcher)
    ran = []
    while batch := batcher.take_batch():
        ran.append(jobs(batch))
        for ticket in batch:
            assert batcher.ran(ticket)
        prepare_all(batcher)
        batcher.check()
    assert ran[:2] == [[0], [1, 2]]
    assert ran[2:] == [[0]] * 4
    assert batcher.pending_patches == 0


def test_preparation_is_bounded_by_workers_and_look_ahead() -> None:
    batcher = make(budget=50, workers=2)
    for job in range(6):
        batcher.add(job, [40])
    first, second = batcher.next_to_prepare(), batcher.next_to_prepare()
    assert first is not None and second is not None
    assert batcher.next_to_prepare() is None  # two workers
    batcher.prepared(first)
    batcher.prepared(second)
    assert batcher.next_to_prepare() is None  # 80 of 100 patches are ahead
    batcher.take_batch()
    assert batcher.next_to_prepare() is not None


def test_a_dropped_job_costs_no_forward() -> None:
    batcher = make()
    batcher.add(0, [30])
    batcher.add(1, [30, 30])
    batcher.add(2, [30])
    prepare_all(batcher)
    batcher.drop(1)
    batcher.check()
    assert batcher.pending_patches == 60
    assert jobs(batcher.take_batch()) == [0, 2]
    batcher.drop(1)  # again: nothing


def test_a_job_dropped_while_it_is_worked_on() -> None:
    batcher = make()
    batcher.add(0, [30])
    batcher.add(1, [30])
    preparing = batcher.next_to_prepare()
    assert preparing is not None
    batcher.drop(0)
    assert not batcher.prepared(preparing)
    prepare_all(batcher)
    (running,) = batcher.take_batch()
    batcher.drop(1)
    assert not batcher.ran(running)
    assert batcher.pending_patches == 0
    batcher.check()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_accounting_survives_any_order_of_events(data: st.DataObject) -> None:
    batcher = make(budget=data.draw(st.integers(1, 80)), workers=data.draw(st.integers(1, 3)))
    preparing: list[Ticket] = []
    running: list[Ticket] = []
    alive: dict[int, list[int]] = {}
    for job in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(("add", "add", "prepare", "ready", "run", "ran", "drop"))):
            case "add":
                units = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))
                batcher.add(job, units, priority=data.draw(st.integers(-1, 1)))
                alive[job] = list(units)
            case "prepare":
                preparing += [t for t in [batcher.next_to_prepare()] if t is not None]
            case "ready" if preparing:
                ticket = preparing.pop()
                assert batcher.prepared(ticket) == (ticket.job in alive)
            case "run" if not running:
                running += batcher.take_batch()
            case "ran" if running:
                ticket = running.pop(0)
                assert batcher.ran(ticket) == (ticket.job in alive)
                if ticket.job in alive:
                    alive[ticket.job].remove(ticket.patches)
                    if not alive[ticket.job]:
                        del alive[ticket.job]
            case "drop" if alive:
                victim = data.draw(st.sampled_from(sorted(alive)))
                batcher.drop(victim)
                del alive[victim]
        batcher.check()
        assert batcher.pending_patches == sum(map(sum, alive.values()))
    _drain(batcher, preparing, running)
    assert batcher.pending_patches == 0


def _drain(batcher: Batcher, preparing: list[Ticket], running: list[Ticket]) -> None:
    """Nothing is stuck: what is left always runs to its end."""
    for ticket in preparing:
        batcher.prepared(ticket)
    for ticket in running:
        batcher.ran(ticket)
    while True:
        prepare_all(batcher)
        batch = batcher.take_batch()
        if not batch:
            return
        for ticket in batch:
            batcher.ran(ticket)


def test_a_batch_is_full_when_waiting_would_not_fill_it_more() -> None:
    batcher = make()
    assert not batcher.batch_is_full()
    for job, patches in enumerate((40, 50, 20)):
        batcher.add(job, [patches])
    ticket = batcher.next_to_prepare()
    assert ticket is not None and batcher.prepared(ticket) and not batcher.batch_is_full()
    prepare_all(batcher)
    assert batcher.batch_is_full()  # 20 does not fit
    batcher.take_batch()
    assert not batcher.batch_is_full()
    batcher.add(3, [30], alone=True)
    prepare_all(batcher)
    assert batcher.batch_is_full()  # what runs alone does not join the 20
    batcher.take_batch()
    assert batcher.batch_is_full()  # and nothing joins it
    batcher.take_batch()
    batcher.add(4, [100])
    prepare_all(batcher)
    assert batcher.batch_is_full()


def test_policy_imports_no_tensors_and_no_grpc() -> None:
    code = (
        "import sys, encoder_svc.batcher as b;"
        "bad = {'torch', 'grpc', 'numpy'} & set(sys.modules);"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
