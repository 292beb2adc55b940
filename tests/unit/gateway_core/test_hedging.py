"""A slow encoder is hedged; one that hangs, flaps or makes no rows is passed by."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from chiasm.config.gateway import RoutingConfig
from chiasm.errors import InvalidMedia
from chiasm.fakes import EncoderFaults, FakeDecoder, FakeEncoder, Script
from chiasm.plan import Cause
from gateway.messages import Delta, JobDone, Sampling
from tests.unit.gateway_core.conftest import Rig, RigMaker, chat, collect, picture, png

HEDGED = RoutingConfig(hedge_after_s=0.1)


async def started(rig: Rig) -> tuple[FakeEncoder, FakeEncoder]:
    """The encoder that was asked, and the other one."""
    async with asyncio.timeout(5):
        while not rig.encodes():
            await asyncio.sleep(0.01)
    (first,) = (e for e in rig.encoders if e.encodes)
    (second,) = (e for e in rig.encoders if e is not first)
    return first, second


def slow(seconds: float = 30.0) -> FakeEncoder:
    return FakeEncoder(faults=EncoderFaults(delay_s=seconds))


async def test_a_slow_encode_is_also_asked_of_another_and_the_loser_is_let_go(
    make_rig: RigMaker,
) -> None:
    decoder = FakeDecoder(Script(land_s=0.5))
    rig = await make_rig(encoders=[slow(), slow()], decoders=[decoder], routing=HEDGED)
    running = asyncio.create_task(collect(rig.pipeline, chat(picture(png()))))
    first, second = await started(rig)
    second.faults.delay_s = 0.0
    async with asyncio.timeout(5):
        while not second.encodes or first.open_encodes:
            await asyncio.sleep(0.01)
    assert second.open_encodes == 1  # the winner's lease is held until the rows have landed
    events = await running
    assert isinstance(events[-1], JobDone)
    (generation,) = decoder.generations
    (added,) = generation.added
    assert not generation.redirects
    assert (added.item, added.part, added.attempt) == (0, 0, 2)
    assert added.source.encode_id == second.encodes[0].encode_id
    assert not second.encodes[0].repair
    assert rig.metric("chiasm_encode_hedges_total", event="sent") == 1
    assert rig.metric("chiasm_encode_hedges_total", event="won") == 1
    await rig.settle()


async def test_the_first_encoder_may_still_win(make_rig: RigMaker) -> None:
    decoder = FakeDecoder(Script(land_s=0.6))
    rig = await make_rig(encoders=[slow(0.3), slow(0.3)], decoders=[decoder], routing=HEDGED)
    running = asyncio.create_task(collect(rig.pipeline, chat(picture(png()))))
    _, second = await started(rig)
    second.faults.delay_s = 30.0
    assert isinstance((await running)[-1], JobDone)
    assert rig.metric("chiasm_encode_hedges_total", event="sent") == 1
    assert rig.metric("chiasm_encode_hedges_total", event="won") == 0
    await rig.settle()


async def test_nothing_is_hedged_that_is_ready_in_time_or_unless_asked_for(
    make_rig: RigMaker,
) -> None:
    for routing in (RoutingConfig(hedge_after_s=5.0), RoutingConfig()):
        decoder = FakeDecoder(Script(land_s=0.5))
        rig = await make_rig(encoders=[slow(0.2), slow(0.2)], decoders=[decoder], routing=routing)
        await collect(rig.pipeline, chat(picture(png())))
        assert rig.encodes() == 1 and not decoder.generations[0].added


async def test_when_the_first_dies_the_hedge_carries_on_alone(make_rig: RigMaker) -> None:
    decoder = FakeDecoder(Script(land_s=1.0))
    rig = await make_rig(encoders=[slow(), slow()], decoders=[decoder], routing=HEDGED)
    running = asyncio.create_task(collect(rig.pipeline, chat(picture(png()))))
    first, second = await started(rig)
    second.faults.delay_s = 0.4
    async with asyncio.timeout(5):
        while not second.encodes:
            await asyncio.sleep(0.01)
    await rig.servers[id(first)].grpc.stop(0)
    assert isinstance((await running)[-1], JobDone)
    assert not decoder.generations[0].redirects
    assert rig.encodes() == 2
    await rig.settle()


async def test_when_both_fail_the_run_moves_with_a_newer_attempt(make_rig: RigMaker) -> None:
    decoder = FakeDecoder(Script(land_s=2.0))
    rig = await make_rig(encoders=[slow(0.5), slow(0.5)], decoders=[decoder], routing=HEDGED)
    for encoder in rig.encoders:
        encoder.faults.fail = Cause.LOST
    running = asyncio.create_task(collect(rig.pipeline, chat(picture(png()))))
    async with asyncio.timeout(5):
        while rig.encodes() < 2:
            await asyncio.sleep(0.01)
    async with asyncio.timeout(5):
        while rig.encodes() < 3:
            await asyncio.sleep(0.01)
            for encoder in rig.encoders:
                if not encoder.open_encodes:
                    encoder.faults = EncoderFaults()
    assert isinstance((await running)[-1], JobDone)
    attempts = [r.attempt for r in decoder.generations[0].redirects]
    assert attempts and attempts[0] == 3
    assert sum(rig.metric("chiasm_encode_moves_total", code=c) for c in ("embedding_lost",)) >= 1
    await rig.settle()


async def test_a_broken_picture_is_a_400_from_either(make_rig: RigMaker) -> None:
    decoder = FakeDecoder(Script(land_s=5.0))
    rig = await make_rig(encoders=[slow(), slow()], decoders=[decoder], routing=HEDGED)
    running = asyncio.create_task(collect(rig.pipeline, chat(picture(png()))))
    _, second = await started(rig)
    second.faults = EncoderFaults(fail=Cause.INVALID_MEDIA)
    with pytest.raises(InvalidMedia):
        await running
    await rig.settle()


class Freezer:
    """Holds a peer's answers back, as SIGSTOP would."""

    def __init__(self) -> None:
        self.thawed = asyncio.Event()
        self.thawed.set()


class FrozenEncoder(FakeEncoder):
    """Can be stopped: no load, no description, no rows."""

    def __init__(self) -> None:
        super().__init__(faults=EncoderFaults())
        self.freezer = Freezer()

    async def WatchLoad(self, request, context):  # noqa: ANN001, ANN201, N802
        while True:
            await self.freezer.thawed.wait()
            yield self.load
            await asyncio.sleep(0.05)

    async def Describe(self, request, context):  # noqa: ANN001, ANN201, N802
        await self.freezer.thawed.wait()
        return await super().Describe(request, context)


class FrozenDecoder(FakeDecoder):
    """Can be stopped: no load, no description, no tokens."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.freezer = Freezer()

    async def WatchLoad(self, request, context):  # noqa: ANN001, ANN201, N802
        while True:
            await self.freezer.thawed.wait()
            yield self.load
            await asyncio.sleep(0.05)

    async def Describe(self, request, context):  # noqa: ANN001, ANN201, N802
        await self.freezer.thawed.wait()
        return await super().Describe(request, context)

    async def Generate(self, requests: AsyncIterator, context):  # noqa: ANN001, ANN201, N802
        async for response in super().Generate(requests, context):
            await self.freezer.thawed.wait()
            yield response


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.discovery.fleet._SILENT_S", 0.4)
    monkeypatch.setattr("gateway.discovery.fleet._DESCRIBE_S", 0.4)
    monkeypatch.setattr("gateway.discovery.fleet._MAX_RETRY_S", 0.3)


@pytest.mark.usefixtures("quick")
async def test_an_encoder_that_hangs_is_given_up_and_its_items_move(make_rig: RigMaker) -> None:
    encoders = [FrozenEncoder(), FrozenEncoder()]
    for encoder in encoders:
        encoder.faults.delay_s = 30.0
    decoder = FakeDecoder(Script(land_s=2.5))
    rig = await make_rig(encoders=encoders, decoders=[decoder])
    running = asyncio.create_task(collect(rig.pipeline, chat(picture(png()))))
    first, second = await started(rig)
    second.faults.delay_s = 0.0
    first.freezer.thawed.clear()
    events = await running
    assert isinstance(events[-1], JobDone)
    assert len(second.encodes) == 1 and second.encodes[0].repair
    assert rig.metric("chiasm_encode_moves_total", code="unavailable") == 1
    assert [e.epoch for e in rig.fleet.encoders.endpoints] == [second.epoch]
    first.freezer.thawed.set()  # SIGCONT
    async with asyncio.timeout(5):
        while len(rig.fleet.encoders.endpoints) < 2:
            await asyncio.sleep(0.02)
    await rig.settle()


@pytest.mark.usefixtures("quick")
async def test_a_decoder_that_hangs_is_given_up_and_its_streams_move(
    make_rig: RigMaker,
    prompts,  # noqa: ANN001
) -> None:
    ids = prompts.encode_text("one two three four five six")
    decoders = [FrozenDecoder(Script(token_ids=ids, token_s=0.03)) for _ in range(2)]
    rig = await make_rig(decoders=decoders)
    job = chat("x", sampling=Sampling(max_tokens=100))
    running = asyncio.create_task(collect(rig.pipeline, job))
    async with asyncio.timeout(5):
        while not any(d.generations for d in decoders):
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    (hit,) = (d for d in decoders if d.generations)
    hit.freezer.thawed.clear()
    events = await running
    text = "".join(e.text for e in events if isinstance(e, Delta))
    assert text == "one two three four five six"
    hit.freezer.thawed.set()
    await rig.settle()
