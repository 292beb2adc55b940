"""NIXL between a real servicer and a real fetcher: chosen per fetch, and left when it fails."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import pytest

from chiasm.transport import DRAM, VRAM, WriteFailed
from chiasm.transport.agent import TransferAgent
from chiasm.transport.nixl import Avoided, NixlOutbound
from decoder_svc.embeddings.events import Broken, Fenced
from tests.unit.transfer.loopback import (
    ROW,
    Nixl,
    PatternEngine,
    Sides,
    bytes_of,
    decoder,
    encoder,
    media_plan,
)
from tests.waiting import until


def moved(e) -> dict[str, float]:
    """Bytes by the memory they were written to, and grants given back."""
    found = {}
    for family in e.servicer._metrics.registry.collect():
        for sample in family.samples:
            if sample.name == "chiasm_encoder_transfer_bytes_total":
                found[sample.labels["memory"]] = sample.value
            elif sample.name == "chiasm_encoder_unwritten_grants_total" and sample.value:
                found["unwritten"] = sample.value
    return found


async def fetched(e, d, name: str = "a", rows: int = 50) -> None:
    plan = media_plan(name, rows)
    encode_id, call = await e.encode(plan)
    d.want(name, plan, [e.source(encode_id)])
    assert await d.rows(name, rows) == bytes_of(plan)
    d.drop(name)
    call.cancel()
    await d.idle()


async def test_rows_are_written_straight_into_the_slab(nixl: Nixl) -> None:
    async with encoder() as e, decoder() as d:
        await fetched(e, d)
        assert moved(e) == {DRAM: 50 * ROW}


async def test_rows_granted_ahead_are_posted_by_the_call_that_says_they_are_ready(
    nixl: Nixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other task of the loop comes between: in a service there are many."""
    write, posted, told = TransferAgent.write, [], []
    gate = asyncio.Event()

    class Gated(PatternEngine):
        async def _run(self, job) -> None:
            await gate.wait()
            buffer = self.make_buffer(job.plan.digest, job.rows)
            self._sink.segment_ready(job.key, 0, job.rows, buffer)
            told.append(len(posted))

    def noted(self, *args):
        posted.append(args)
        return write(self, *args)

    monkeypatch.setattr(TransferAgent, "write", noted)
    async with encoder(Gated(segment_rows=50)) as e, decoder() as d:
        plan = media_plan("a")
        encode_id, _ = await e.encode(plan)
        d.want("r", plan, [e.source(encode_id)])

        def granted() -> bool:
            (session,) = e.servicer.fetches._sessions.values() or (None,)
            if session is None or not session.has_grants():
                return False
            stream = session.wake.__self__
            return stream._idle and not stream._wake.is_set()

        await until(granted)
        gate.set()
        assert await d.rows("r", 50) == bytes_of(plan)
    assert told == [1]


async def test_small_grants_may_travel_on_the_stream(nixl: Nixl) -> None:
    async with encoder() as e, decoder() as d:
        d.inline_bytes = 8 * ROW
        await fetched(e, d, "a", rows=7)
        assert moved(e) == {"stream": 7 * ROW}
        await fetched(e, d, "b", rows=8)
        assert moved(e) == {"stream": 7 * ROW, DRAM: 8 * ROW}


async def test_a_decoder_without_nixl_gets_rows_on_the_stream(nixl: Nixl) -> None:
    async with encoder() as e:
        Sides.nixl = None
        async with decoder() as d:
            await fetched(e, d)
        assert moved(e) == {"stream": 50 * ROW}


async def test_an_encoder_without_nixl_sends_rows_on_the_stream(nixl: Nixl) -> None:
    Sides.nixl = None
    async with encoder() as e:
        Sides.nixl = nixl
        async with decoder() as d:
            await fetched(e, d)
        assert moved(e) == {"stream": 50 * ROW}


async def test_rows_of_a_gpu_are_not_written_to_host_memory(nixl: Nixl) -> None:
    engine = PatternEngine()
    outbound = nixl.outbound(engine)
    outbound._memory_type = VRAM
    async with encoder(engine, outbound=outbound) as e, decoder() as d:
        await fetched(e, d)
        assert moved(e) == {"stream": 50 * ROW}


async def test_a_peer_that_cannot_be_reached_is_served_on_the_stream(nixl: Nixl) -> None:
    async with encoder() as e, decoder() as d:
        assert d.landing is not None
        agent, d.landing._agent = d.landing._agent, None
        broken = TransferAgent()
        broken.metadata = b"nonsense"
        d.landing._agent = broken
        await fetched(e, d)
        assert moved(e) == {"stream": 50 * ROW}
        d.landing._agent = agent
        broken.close()


@pytest.mark.parametrize("aborted", [False, True])
async def test_a_failed_write_moves_the_rest_of_the_fetch_to_the_stream(
    nixl: Nixl, monkeypatch: pytest.MonkeyPatch, aborted: bool
) -> None:
    write, left = TransferAgent.write, [1]

    def failing(self, *args):  # the second grant fails, and all after it would
        if left:
            left.pop()
            return write(self, *args)
        over: Future[None] = Future()
        over.set_exception(WriteFailed("made to fail", aborted=aborted))
        return over

    monkeypatch.setattr(TransferAgent, "write", failing)
    async with encoder() as e, decoder() as d:
        assert d.landing is not None
        await fetched(e, d)
        found = moved(e)
        assert found["unwritten"] and found[DRAM] + found["stream"] == 50 * ROW
        assert d.landing.generation == aborted  # a lost writer costs the agent, and once only
        before = found["stream"]
        await fetched(e, d, "b")  # the peer is avoided for a while
        assert moved(e)["stream"] == before + 50 * ROW


async def test_a_broken_stream_costs_the_agent_and_the_next_fetch_uses_the_new_one(
    nixl: Nixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = asyncio.Event()
    write = TransferAgent.write
    posted: list[Future[None]] = []

    def stuck(self, *args):
        over: Future[None] = Future()
        posted.append(over)

        async def later() -> None:
            await gate.wait()
            over.set_exception(WriteFailed("the connection is gone", aborted=True))

        asyncio.get_running_loop().create_task(later())
        return over

    async with encoder() as e, decoder() as d:
        assert d.landing is not None
        monkeypatch.setattr(TransferAgent, "write", stuck)
        plan = media_plan("a")
        encode_id, call = await e.encode(plan)
        d.want("a", plan, [e.source(encode_id)])
        await until(lambda: bool(posted))
        for fetch in tuple(d.fetcher._calls.values()):
            fetch.break_off()
        await d.until(lambda: any(isinstance(event, Broken) for event in d.events))
        d.drop("a")
        held = 16 - d.receiver.num_free_pages
        await asyncio.sleep(0.2)
        assert held and 16 - d.receiver.num_free_pages == held
        gate.set()
        await d.until(lambda: any(isinstance(event, Fenced) for event in d.events))
        await d.idle()
        assert d.landing.generation == 1
        call.cancel()
        monkeypatch.setattr(TransferAgent, "write", write)
        await asyncio.sleep(1.1)
        await fetched(e, d, "b")
        assert moved(e) == {DRAM: 50 * ROW, "unwritten": 1}


def test_who_fails_is_avoided_for_longer_and_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("chiasm.transport.nixl.time.monotonic", lambda: now[0])
    avoided = Avoided()
    pauses = []
    for generation in range(5):
        avoided.add(f"peer.{generation}")
        assert "peer.9" in avoided and "other.0" not in avoided
        began = now[0]
        while "peer.0" in avoided:
            now[0] += 0.5
        pauses.append(now[0] - began)
    assert pauses == [1.0, 10.0, 60.0, 300.0, 300.0]
    avoided.remove("peer.3")
    avoided.add("peer.0")
    assert "peer.0" in avoided
    now[0] += 1.0
    assert "peer.0" not in avoided


def test_who_has_not_been_tried_for_long_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("chiasm.transport.nixl.time.monotonic", lambda: now[0])
    avoided = Avoided()
    for life in range(100):
        avoided.add(f"life{life}.0")
        now[0] += 100.0
    assert "life99.0" not in avoided and len(avoided._until) <= 5
    avoided.add("life0.0")
    now[0] += 1.0
    assert "life0.0" not in avoided, "its failures are forgotten: the first pause again"


def test_the_outbound_end_keeps_one_list_of_whom_to_avoid() -> None:
    agent = TransferAgent()
    assert isinstance(NixlOutbound(agent, DRAM).avoided, Avoided)
    agent.close()
