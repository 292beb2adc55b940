"""The property test is worth something: each of these faults, planted, is caught by it.

A mutant lives while its patch is applied; the scripts are the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from unittest import mock

import pytest

from decoder_svc.embeddings.events import Demand
from decoder_svc.embeddings.fetch import Fetch
from decoder_svc.embeddings.granting import GrantPlanner
from decoder_svc.embeddings.receiver import EmbeddingReceiver
from encoder_svc.fetch_session import FetchSession, SessionState
from encoder_svc.fetch_table import FetchTable
from encoder_svc.store import EmbeddingStore
from tests.contract.transfer_model.scripts import scripts
from tests.contract.transfer_model.world import World

MAX_SCRIPTS = 300
Mutant = AbstractContextManager[object]

REUSED = "was written into a page granted to"
STUCK = "for ever|come to rest"


def _free_now(receiver: EmbeddingReceiver, fetch: Fetch) -> None:
    for slot in fetch.slots:
        receiver._pool.free(slot.page)
    fetch.grants.clear()


def frees_on_cancel_without_quiesced() -> Mutant:
    end = EmbeddingReceiver._end

    def mutant(self: EmbeddingReceiver, fetch: Fetch, *, cancel: bool = True) -> None:
        end(self, fetch, cancel=cancel)
        _free_now(self, fetch)

    return mock.patch.object(EmbeddingReceiver, "_end", mutant)


def reuses_pages_before_the_fence() -> Mutant:
    on_broken = EmbeddingReceiver._on_broken

    def mutant(self: EmbeddingReceiver, fetch: Fetch) -> None:
        on_broken(self, fetch)
        _free_now(self, fetch)

    return mock.patch.object(EmbeddingReceiver, "_on_broken", mutant)


def takes_stale_attempts() -> Mutant:
    return mock.patch.object(EmbeddingReceiver, "_is_stale", lambda *_: False)


def takes_fetches_of_another_life() -> Mutant:
    return mock.patch.object(FetchTable, "_is_other_life", lambda *_: False)


def grants_without_a_reserve() -> Mutant:
    return mock.patch.object(GrantPlanner, "_may_take", lambda self, *_: self._pool.num_free > 0)


def spends_the_reserve_on_later_rows() -> Mutant:
    def mutant(self: GrantPlanner, request_id: str, turn: object) -> bool:
        head = getattr(turn, "head", None)
        return self._pool.num_free > (0 if request_id == head else self._reserve)

    return mock.patch.object(GrantPlanner, "_may_take", mutant)


def lets_the_young_take_the_reserve() -> Mutant:
    def mutant(self: GrantPlanner, request_id: str, turn: object) -> bool:
        frontier = getattr(turn, "frontier", False)
        return self._pool.num_free > (0 if frontier else self._reserve)

    return mock.patch.object(GrantPlanner, "_may_take", mutant)


def spends_the_reserve_ahead() -> Mutant:
    return mock.patch.object(GrantPlanner, "_has_plenty", lambda self: self._pool.num_free > 0)


def forgets_a_head_that_demands_nothing() -> Mutant:
    grant = EmbeddingReceiver.grant

    def mutant(self: EmbeddingReceiver, demands: Sequence[Demand]) -> None:
        grant(self, [demand for demand in demands if len(demand.rows)])

    return mock.patch.object(EmbeddingReceiver, "grant", mutant)


def thinks_that_nothing_has_moved() -> Mutant:
    always = property(lambda _: 1, lambda *_: None)
    return mock.patch.object(EmbeddingReceiver, "revision", always, create=True)


def answers_the_fence_while_writing() -> Mutant:
    fence = FetchTable.fence

    def mutant(self: FetchTable, fetch_id: bytes) -> None:
        fence(self, fetch_id)

    return mock.patch.object(FetchTable, "fence", mutant)


def says_quiesced_while_writing() -> Mutant:
    def mutant(self: FetchSession) -> None:
        if not self.stopping:
            self.state = SessionState.STOPPING
            self._pending.clear()
            self._end()

    def write_ended(self: FetchSession, crc32: int | None) -> None:
        if self.ended:
            return
        original(self, crc32)

    original = FetchSession.write_ended
    return mock.patch.multiple(FetchSession, _stop=mutant, write_ended=write_ended)


def keeps_interest_of_ended_fetches() -> Mutant:
    return mock.patch.object(EmbeddingStore, "end_fetch", lambda *_: None)


@pytest.mark.parametrize(
    ("mutant", "message"),
    [
        (frees_on_cancel_without_quiesced, REUSED),
        (reuses_pages_before_the_fence, REUSED),
        (takes_stale_attempts, STUCK),
        (takes_fetches_of_another_life, "another life"),
        (grants_without_a_reserve, STUCK),
        (spends_the_reserve_on_later_rows, STUCK),
        (lets_the_young_take_the_reserve, STUCK),
        (spends_the_reserve_ahead, STUCK),
        (forgets_a_head_that_demands_nothing, STUCK),
        (thinks_that_nothing_has_moved, "could have been more"),
        (answers_the_fence_while_writing, REUSED),
        (says_quiesced_while_writing, REUSED),
        (keeps_interest_of_ended_fetches, "interest differs"),
    ],
)
def test_a_planted_fault_is_caught(mutant: Callable[[], Mutant], message: str) -> None:
    with mutant(), pytest.raises(AssertionError, match=message):
        for script in scripts(0, MAX_SCRIPTS):
            World().run(script)


def test_without_a_fault_the_same_scripts_pass() -> None:
    for script in scripts(0, 30):
        World().run(script)
