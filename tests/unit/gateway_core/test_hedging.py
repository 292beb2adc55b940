"""A slow encoder is hedged; one that hangs, flaps or makes no rows is passed by.

Nothing here is slow by the clock: rows are ready, and have landed, when the test says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from chiasm.config.gateway import RoutingConfig
from chiasm.errors import InvalidMedia
from chiasm.fakes import EncoderFaults, FakeDecoder, FakeEncoder, Script
from chiasm.plan import Cause, MediaPlan
from chiasm.v1 import decoder_pb2
from gateway.encode_call import EncodeCall
from gateway.lease import Lease
from gateway.messages import Delta, JobDone, Sampling
from tests.unit.gateway_core.conftest import Rig, RigMaker, chat, collect, picture, png
from tests.waiting import until

HEDGED = RoutingConfig(hedge_after_s=0.1)


class GatedEncoder(FakeEncoder):
    """Its rows are ready, or have failed, once the gate is open.

    Args:
        verdicts: What its first Encodes end as; those after them end well.
    """

    def __init__(self, *verdicts: Cause) -> None:
        super().__init__(faults=EncoderFaults(judge=self._judge))
        self.gate = asyncio.Event()
        self.verdicts = list(verdicts)

    async def _judge(self, plan: MediaPlan, media: bytes) -> Cause | None:
        await self.gate.wait()
        return self.verdicts.pop(0) if self.verdicts else None


def gated_decoder() -> tuple[FakeDecoder, asyncio.Event]:
    """One whose items land once the event is set."""
    land = asyncio.Event()

    async def land_when(promise: decoder_pb2.Promise) -> None:
        await land.wait()

    return FakeDecoder(Script(land_when=land_when)), land


async def started(rig: Rig) -> tuple[GatedEncoder, GatedEncoder]:
    """The encoder that was asked first, and the other one."""
    await until(rig.encodes)
    decoder = rig.decoders[0]
    await until(lambda: decoder.generations)
    promised = decoder.generations[0].start.promises[0].parts[0].source.encode_id
    await until(lambda: any(e.encode_id == promised for x in rig.encoders for e in x.encodes))
    (first,) = (e for e in rig.encoders if e.encodes and e.encodes[0].encode_id == promised)
    (second,) = (e for e in rig.encoders if e is not first)
    assert isinstance(first, GatedEncoder) and isinstance(second, GatedEncoder)
    return first, second


async def test_a_slow_encode_is_also_asked_of_another_and_the_loser_is_let_go(
    make_rig: RigMaker,
) -> None:
    decoder, land = gated_decoder()
    rig = await make_rig(
        encoders=[GatedEncoder(), GatedEncoder()], decoders=[decoder], routing=HEDGED
    )
    running = asyncio.create_task(collect(rig.pipeline, chat(picture(png()))))
    first, second = await started(rig)
    (generation,) = decoder.generations
    await until(lambda: second.encodes and generation.added)
    second.gate.set()
    await until(lambda: not first.open_encodes)
    assert second.open_encodes == 1  # the winner's lease is held until the rows have landed
    land.set()
    events = await running
    assert isinstance(events[-1], JobDone)
    (added,) = generation.added
    assert not generation.redirects
    assert (added.item, added.part, added.attempt) == (0, 0, 2)
    assert added.source.encode_id == second.encodes[0].encode_id
    assert not second.encodes[0].repair
    assert rig.metric("chiasm_encode_hedges_total", event="sent") == 1
    assert rig.metric("chiasm_encode_hedges_total", event="won") == 1
    await rig.settle()


async def test_the_first_encoder_may_still_win(make_rig: RigMaker) -> None:
    decoder, land = gated_decoder()
    rig = await make_rig(
        encoders=[GatedEncoder(), GatedEncoder()], decoders=[decoder], routing=HEDGED
    )
    running = asyncio.create_task(collect(rig.pipeline, chat(picture(png()))))
    first, second = await started(rig)
    await until(lambda: second.encodes)
    first.gate.set()
    await until(lambda: not second.open_encodes)
    assert first.open_encodes == 1
    land.set()
    assert isinstance((await running)[-1], JobDone)
    assert rig.metric("chiasm_encode_hedges_total", event="sent") == 1
    assert rig.metric("chiasm_encode_hedges_total", event="won") == 0
    await rig.settle()


async def test_nothing_is_hedged_whose_first_rows_are_ready_when_its_time_is_over(
    make_rig: RigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, land = asyncio.Event(), asyncio.Event()
    call_ready, hedge = Lease.call_ready, Lease._hedge

    def note_ready(lease: Lease, call: EncodeCall) -> None:
        call_ready(lease, call)
        ready.set()

    async def time_is_over(lease: Lease) -> None:
        await ready.wait()
        await hedge(lease)
        land.set()

    async def land_when(promise: decoder_pb2.Promise) -> None:
        await land.wait()

    monkeypatch.setattr(Lease, "call_ready", note_ready)
    monkeypatch.setattr(Lease, "_hedge", time_is_over)
    decoder = FakeDecoder(Script(land_when=land_when))
    rig = await make_rig(encoders=2, decoders=[decoder], routing=HEDGED)
    assert isinstance((await collect(rig.pipeline, chat(picture(png()))))[-1], JobDone)
    assert rig.encodes() == 1 and not decoder.generations[0].added


async def test_nothing_is_hedged_unless_asked_for(make_rig: RigMaker) -> None:
    decoder, land = gated_decoder()
    encoders = [GatedEncoder(), GatedEncoder()]
    rig = await make_rig(encoders=encoders, decoders=[decoder], routing=RoutingConfig())
    running = asyncio.create_task(collect(rig.pipeline, chat(picture(png()))))
    first, _ = await started(rig)
    await asyncio.sleep(0.3)  # three times what a hedge waits for in the other tests
    first.gate.set()
    land.set()
    assert isinstance((await running)[-1], JobDone)
    assert rig.encodes() == 1 and not decoder.generations[0].added


async def test_when_the_first_dies_the_hedge_carries_on_alone(make_rig: RigMaker) -> None:
    decoder, land = gated_decoder()
    rig = await make_rig(
        encoders=[GatedEncoder(), GatedEncoder()], decoders=[decoder], routing=HEDGED
    )
    running = asyncio.create_task(collect(rig.pipeline, chat(picture(png()))))
    first, second = await started(rig)
    await until(lambda: second.encodes)
    await rig.servers[id(first)].grpc.stop(0)
    # The gateway knows: its call to the first has ended, its stream of the first's load too.
    await until(lambda: [e.epoch for e in rig.fleet.encoders.endpoints] == [second.epoch])
    second.gate.set()
    land.set()
    assert isinstance((await running)[-1], JobDone)
    assert not decoder.generations[0].redirects
    assert rig.encodes() == 2
    await rig.settle()


async def test_when_both_fail_the_run_moves_with_a_newer_attempt(make_rig: RigMaker) -> None:
    decoder, land = gated_decoder()
    encoders = [GatedEncoder(Cause.LOST), GatedEncoder(Cause.LOST)]
    rig = await make_rig(encoders=encoders, decoders=[decoder], routing=HEDGED)
    running = asyncio.create_task(collect(rig.pipeline, chat(picture(png()))))
    first, second = await started(rig)
    await until(lambda: second.encodes)
    first.gate.set()
    second.gate.set()
    (generation,) = decoder.generations
    await until(lambda: rig.encodes() >= 3 and generation.redirects)
    land.set()
    assert isinstance((await running)[-1], JobDone)
    assert generation.redirects[0].attempt == 3
    assert rig.metric("chiasm_encode_moves_total", code="embedding_lost") >= 1
    await rig.settle()


async def test_a_broken_picture_is_a_400_from_either(make_rig: RigMaker) -> None:
    decoder, _ = gated_decoder()
    rig = await make_rig(
        encoders=[GatedEncoder(), GatedEncoder()], decoders=[decoder], routing=HEDGED
    )
    running = asyncio.create_task(collect(rig.pipeline, chat(picture(png()))))
    _, second = await started(rig)
    second.verdicts.append(Cause.INVALID_MEDIA)
    second.gate.set()
    with pytest.raises(InvalidMedia):
        await running
    await rig.settle()


class Freezer:
    """Holds a peer's answers back, as SIGSTOP would."""

    def __init__(self) -> None:
        self.thawed = asyncio.Event()
        self.thawed.set()


class FrozenEncoder(GatedEncoder):
    """Can be stopped: no load, no description, no rows."""

    def __init__(self) -> None:
        super().__init__()
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
    """Can be stopped: no load, no description, no tokens. Says three, then waits to go on."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.freezer = Freezer()
        self.halfway = asyncio.Event()
        self.go_on = asyncio.Event()

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
            if response.HasField("tokens") and response.tokens.position == 3:
                self.halfway.set()
                await self.go_on.wait()
            await self.freezer.thawed.wait()
            yield response


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer is silent sooner. One that only hears us late is described, and is there again."""
    monkeypatch.setattr("gateway.discovery.fleet._SILENT_S", 1.0)
    monkeypatch.setattr("gateway.discovery.fleet._DESCRIBE_S", 3.0)


@pytest.mark.usefixtures("quick")
async def test_an_encoder_that_hangs_is_given_up_and_its_items_move(make_rig: RigMaker) -> None:
    decoder, land = gated_decoder()
    rig = await make_rig(encoders=[FrozenEncoder(), FrozenEncoder()], decoders=[decoder])
    running = asyncio.create_task(collect(rig.pipeline, chat(picture(png()))))
    first, second = await started(rig)
    assert isinstance(first, FrozenEncoder)
    second.gate.set()
    first.freezer.thawed.clear()
    await until(lambda: second.encodes)
    land.set()
    events = await running
    assert isinstance(events[-1], JobDone)
    assert len(second.encodes) == 1 and second.encodes[0].repair
    assert rig.metric("chiasm_encode_moves_total", code="unavailable") == 1
    await until(lambda: [e.epoch for e in rig.fleet.encoders.endpoints] == [second.epoch])
    first.freezer.thawed.set()  # SIGCONT
    await until(lambda: len(rig.fleet.encoders.endpoints) == 2)
    await rig.settle()


@pytest.mark.usefixtures("quick")
async def test_a_decoder_that_hangs_is_given_up_and_its_streams_move(
    make_rig: RigMaker,
    prompts,  # noqa: ANN001
) -> None:
    ids = prompts.encode_text("one two three four five six")
    decoders = [FrozenDecoder(Script(token_ids=ids)) for _ in range(2)]
    rig = await make_rig(decoders=decoders)
    job = chat("x", sampling=Sampling(max_tokens=100))
    running = asyncio.create_task(collect(rig.pipeline, job))
    await until(lambda: any(d.halfway.is_set() for d in decoders))
    (hit,) = (d for d in decoders if d.halfway.is_set())
    hit.freezer.thawed.clear()
    for decoder in decoders:
        decoder.go_on.set()
    events = await running
    assert [len(d.generations) for d in decoders] == [1, 1]
    text = "".join(e.text for e in events if isinstance(e, Delta))
    assert text == "one two three four five six"
    hit.freezer.thawed.set()
    await rig.settle()
