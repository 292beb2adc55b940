"""What fails and what the client sees of it: broken media, lost rows, dying peers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import pytest

from chiasm.config.gateway import AdmissionConfig
from chiasm.errors import (
    EmbeddingLost,
    InvalidMedia,
    ResourceExhausted,
    TooLarge,
    Unavailable,
)
from chiasm.fakes import EncoderFaults, FakeDecoder, FakeEncoder, Script
from chiasm.plan import Cause, MediaPlan, Modality, Promise, Span
from chiasm.v1 import common_pb2, decoder_pb2
from gateway.messages import (
    ChoiceDone,
    Delta,
    Event,
    JobDone,
    MediaPart,
    Sampling,
)
from tests.unit.gateway_core.clips import clip
from tests.unit.gateway_core.conftest import RigMaker, chat, collect, never, picture, png
from tests.waiting import until


def text_of(events: list, choice: int = 0) -> str:
    return "".join(e.text for e in events if isinstance(e, Delta) and e.choice == choice)


async def test_broken_picture_is_refused_before_any_event(make_rig: RigMaker) -> None:
    encoder = FakeEncoder(faults=EncoderFaults(fail=Cause.INVALID_MEDIA))
    rig = await make_rig(encoders=[encoder], decoders=[FakeDecoder(Script(land_when=never))])
    with pytest.raises(InvalidMedia) as failure:
        await collect(rig.pipeline, chat("x", picture(png(), 1)))
    assert failure.value.param == "messages[0].content[1]"
    assert len(encoder.encodes) == 1  # a bad file does not walk from replica to replica
    await rig.settle()


async def test_first_event_waits_for_every_item(make_rig: RigMaker) -> None:
    """The decoder has sent every token, but the picture is not decoded yet."""
    decoded = asyncio.Event()

    async def judge(plan: MediaPlan, media: bytes) -> None:
        await decoded.wait()

    encoder = FakeEncoder(faults=EncoderFaults(judge=judge))
    decoder = EagerDecoder(Script())
    rig = await make_rig(encoders=[encoder], decoders=[decoder])
    async with aclosing(rig.pipeline.run(chat(picture(png())))) as events:
        first = asyncio.ensure_future(anext(events))
        await until(lambda: decoder.generations and not decoder.running and encoder.media)
        await asyncio.sleep(0.1)  # tokens that were not held back would have come out
        assert not first.done()
        decoded.set()
        assert isinstance(await first, Delta)


async def test_lost_rows_are_encoded_elsewhere(make_rig: RigMaker) -> None:
    decoder = FakeDecoder(Script(lose=(Cause.LOST,)))
    rig = await make_rig(encoders=2, decoders=[decoder])
    events = await collect(rig.pipeline, chat(picture(png())))
    assert isinstance(events[-1], JobDone)
    (redirect,) = decoder.generations[0].redirects
    first, second = (e for encoder in rig.encoders for e in encoder.encodes)
    assert redirect.attempt == 2
    old = decoder.generations[0].start.promises[0].parts[0].source
    assert redirect.source.endpoint != old.endpoint
    assert redirect.source.encode_id in {first.encode_id, second.encode_id}
    await rig.settle()


async def test_recalled_rows_may_come_from_the_same_encoder(make_rig: RigMaker) -> None:
    decoder = FakeDecoder(Script(lose=(Cause.PREEMPTED,) * 5))
    rig = await make_rig(decoders=[decoder])
    events = await collect(rig.pipeline, chat(picture(png())))
    assert isinstance(events[-1], JobDone)
    assert [r.attempt for r in decoder.generations[0].redirects] == [2, 3, 4, 5, 6]
    await rig.settle()


async def test_only_promised_rows_are_encoded_again_as_a_repair(make_rig: RigMaker) -> None:
    """A first attempt is back-pressure's business; evicted rows are asked for after a pause."""
    decoder = FakeDecoder(Script(lose=(Cause.EVICTED,) * 3))
    rig = await make_rig(decoders=[decoder])
    loop = asyncio.get_running_loop()
    began = loop.time()
    events = await collect(rig.pipeline, chat(picture(png())))
    assert isinstance(events[-1], JobDone)
    first, *again = rig.encoders[0].encodes  # an attempt may be lost before its Encode is sent
    assert not first.repair
    assert again and all(start.repair for start in again)
    assert [r.attempt for r in decoder.generations[0].redirects] == [2, 3, 4]
    assert loop.time() - began >= 0.1 + 0.2 + 0.3
    await rig.settle()


async def test_losses_are_bounded(make_rig: RigMaker) -> None:
    decoder = FakeDecoder(Script(lose=(Cause.LOST,) * 50))
    rig = await make_rig(encoders=3, decoders=[decoder])
    with pytest.raises(EmbeddingLost):
        await collect(rig.pipeline, chat(picture(png())))
    assert rig.encodes() <= 3
    await rig.settle()


@pytest.mark.parametrize("cause", [Cause.INVALID_MEDIA, Cause.TOO_LARGE])
async def test_client_faults_told_by_the_decoder_are_not_retried(
    make_rig: RigMaker, cause: Cause
) -> None:
    rig = await make_rig(encoders=2, decoders=[FakeDecoder(Script(lose=(cause,)))])
    kind = InvalidMedia if cause is Cause.INVALID_MEDIA else TooLarge
    with pytest.raises(kind) as failure:
        await collect(rig.pipeline, chat(picture(png())))
    assert failure.value.param == "messages[0].content[0]"
    assert rig.encodes() == 1
    await rig.settle()


async def test_a_dying_encoder_is_replaced_unasked(make_rig: RigMaker) -> None:
    async def the_other_has_it(promise: decoder_pb2.Promise) -> None:
        await until(lambda: all(encoder.encodes for encoder in encoders))

    async def judge(plan: MediaPlan, media: bytes) -> None:
        await until(lambda: all(encoder.encodes for encoder in encoders))

    encoders = [FakeEncoder(faults=EncoderFaults(judge=judge)) for _ in range(2)]
    decoder = FakeDecoder(Script(land_when=the_other_has_it))
    rig = await make_rig(encoders=encoders, decoders=[decoder])
    running = asyncio.create_task(collect(rig.pipeline, chat(picture(png()))))
    await until(rig.encodes)
    (hit,) = (e for e in encoders if e.encodes)
    (other,) = (e for e in encoders if e is not hit)
    await rig.servers[id(hit)].grpc.stop(0)
    events = await running
    assert isinstance(events[-1], JobDone)
    assert len(other.encodes) == 1
    assert [r.attempt for r in decoder.generations[0].redirects] == [2]


async def test_a_full_encoder_passes_to_the_next_and_all_full_is_429(make_rig: RigMaker) -> None:
    encoders = [FakeEncoder(faults=EncoderFaults(exhausted=True)) for _ in range(2)]
    decoder = FakeDecoder(Script(land_when=never))
    impatient = AdmissionConfig(queue_timeout_s=0.0)
    rig = await make_rig(encoders=encoders, decoders=[decoder], admission=impatient)
    with pytest.raises(ResourceExhausted) as failure:
        await collect(rig.pipeline, chat(picture(png())))
    assert failure.value.retry_after_s
    assert [len(e.encodes) for e in encoders] == [1, 1]


async def test_a_service_that_was_full_is_asked_again_before_anything_is_refused(
    make_rig: RigMaker,
) -> None:
    encoder = FakeEncoder(faults=EncoderFaults(exhausted=True))
    decoder = FakeDecoder(Script(land_when=lambda promise: encoder.made(source_of(promise))))
    rig = await make_rig(encoders=[encoder], decoders=[decoder])
    running = asyncio.create_task(collect(rig.pipeline, chat(picture(png()))))
    await until(lambda: len(encoder.encodes) >= 3)
    assert not running.done()
    assert rig.pipeline.admission.queued <= 1
    encoder.faults.exhausted = False
    assert isinstance((await running)[-1], JobDone)
    rig.pipeline.admission.check()
    assert rig.pipeline.admission.inflight == 0
    await rig.settle()


def source_of(promise: decoder_pb2.Promise) -> bytes:
    return promise.parts[0].source.encode_id


async def test_a_decoder_that_fails_before_the_first_token_is_replaced(
    make_rig: RigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.patience.PATIENCE_S", 0.2)
    decoders = [FakeDecoder(Script(refuse=Unavailable("down"))) for _ in range(2)]
    rig = await make_rig(decoders=decoders)
    with pytest.raises(Unavailable):
        await collect(rig.pipeline, chat("x"))
    decoders[1].script.refuse = None
    address = rig.servers[id(decoders[1])].address
    (other,) = (e for e in rig.fleet.decoders.endpoints if e.address != address)
    await until(lambda: rig.fleet.decoders.pick(b"", tokens=1, exclude=(other,)))  # the back-off
    events = await collect(rig.pipeline, chat("x", picture(png())))
    assert isinstance(events[-1], JobDone)
    await rig.settle()


async def test_a_request_outlives_its_decoder(make_rig: RigMaker, prompts) -> None:  # noqa: ANN001
    ids = prompts.encode_text("one two three four five six")
    known = asyncio.Event()
    scripts = [Script(token_ids=ids, die_after=4, step_when=held(known)) for _ in range(2)]
    decoders = [FakeDecoder(script) for script in scripts]
    rig = await make_rig(decoders=decoders)
    job = chat("x", picture(png()), sampling=Sampling(max_tokens=100, n=2))
    running = asyncio.create_task(collect(rig.pipeline, job))
    await until(lambda: any(d.generations for d in decoders))
    (second,) = (d for d in decoders if not d.generations)
    second.script.die_after = None
    known.set()
    events = await running
    assert text_of(events, 0) == text_of(events, 1) == "one two three four five six"
    assert isinstance(events[-1], JobDone)
    (first,) = (d for d in decoders if d is not second)
    before, after = first.generations[0].start, second.generations[0].start
    assert [list(r.output_ids) for r in after.resume_from] == [list(ids[:4])] * 2
    assert after.prompt_token_ids == before.prompt_token_ids
    assert after.sampling == before.sampling  # the seed too: the draws go on
    assert events[-1].usage.completion_tokens == 2 * len(ids)
    await rig.settle()


def held(go_on: asyncio.Event, at: int = 0) -> Callable[[int], Awaitable[None]]:
    """`Script.step_when`: no step from `at` on before the event."""

    async def wait(step: int) -> None:
        if step >= at:
            await go_on.wait()

    return wait


STALLED = common_pb2.Load(draining=True, stalled=True)


@pytest.mark.parametrize("num_decoders", [1, 2])
async def test_who_waits_for_lost_ranks_moves_where_there_is_another(
    make_rig: RigMaker,
    prompts,  # noqa: ANN001
    num_decoders: int,
) -> None:
    ids = prompts.encode_text("one two three four five six")
    told = asyncio.Event()
    decoders = [
        FakeDecoder(Script(token_ids=ids, step_when=held(told, at=3))) for _ in range(num_decoders)
    ]
    rig = await make_rig(decoders=decoders)
    async with aclosing(rig.pipeline.run(chat("x", sampling=Sampling(max_tokens=100)))) as run:
        events = [await anext(run)]
        (first,) = (d for d in decoders if d.generations)
        first.load.CopyFrom(STALLED)
        rest = asyncio.ensure_future(remaining(run))
        if num_decoders == 1:
            await until(lambda: not rig.fleet.decoders.taking)
        else:
            await until(lambda: all(d.generations for d in decoders))
        told.set()
        events += await rest
    assert text_of(events) == "one two three four five six"
    assert events[-1].usage.completion_tokens == len(ids)
    asked = [len(d.generations) for d in decoders]
    assert asked == [1] * num_decoders, "alone, it waits; with another it goes on there"
    if num_decoders == 2:
        (second,) = (d for d in decoders if d is not first)
        (resumed,) = second.generations[0].start.resume_from
        assert 0 < len(resumed.output_ids) < len(ids)
    await rig.settle()


async def remaining(run: AsyncIterator[Event]) -> list[Event]:
    return [event async for event in run]


async def test_rows_that_cannot_be_had_are_no_fault_of_the_decoder(make_rig: RigMaker) -> None:
    scripts = [Script(refuse=EmbeddingLost("no rows in time")) for _ in range(2)]
    decoders = [FakeDecoder(script) for script in scripts]
    rig = await make_rig(decoders=decoders)
    with pytest.raises(EmbeddingLost):
        await collect(rig.pipeline, chat("x"))
    assert all(rig.fleet.decoders.pick(bytes([i]), tokens=1) for i in range(9))


async def test_another_process_at_a_decoders_address_is_not_believed(
    make_rig: RigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.patience.PATIENCE_S", 0.2)
    rig = await make_rig()
    rig.decoders[0].epoch += 1  # as if it had restarted between Describe and Generate
    with pytest.raises(Unavailable, match="another process"):
        await collect(rig.pipeline, chat("x"))
    await rig.settle()


async def test_a_full_decoder_passes_to_the_next(make_rig: RigMaker) -> None:
    full, free = FakeDecoder(Script(refuse=ResourceExhausted("full"))), FakeDecoder(Script())
    rig = await make_rig(decoders=[full, free])
    for index in range(6):
        events = await collect(rig.pipeline, chat(f"{index}"))
        assert isinstance(events[-1], JobDone)
    free.script.refuse = ResourceExhausted("full")
    rig.pipeline.admission.queue_timeout_s = 0.0
    with pytest.raises(ResourceExhausted):
        await collect(rig.pipeline, chat("x"))


async def test_a_decoder_that_is_stopped_is_replaced_too(make_rig: RigMaker) -> None:
    """What a stopping server answers is no verdict on the request."""
    stopped = asyncio.Event()
    script = Script(token_ids=(70,) * 30, step_when=held(stopped, at=5))
    decoders = [FakeDecoder(script), FakeDecoder(script)]
    rig = await make_rig(decoders=decoders)
    async with aclosing(rig.pipeline.run(chat("x", sampling=Sampling(max_tokens=40)))) as run:
        events = [await anext(run)]
        (first,) = (d for d in decoders if d.generations)
        rest = asyncio.ensure_future(remaining(run))
        await rig.servers[id(first)].grpc.stop(0)
        stopped.set()
        events += await rest
    assert [len(d.generations) for d in decoders] == [1, 1]
    assert sum(len(e.token_ids) for e in events if isinstance(e, Delta)) == 30


async def test_a_choice_that_had_ended_is_stopped_at_the_next_decoder(make_rig: RigMaker) -> None:
    known = asyncio.Event()
    script = Script(per_choice={0: (70,), 1: (71,) * 9}, die_after=3, step_when=held(known))
    decoders = [FakeDecoder(script), FakeDecoder(script)]
    rig = await make_rig(decoders=decoders)
    running = asyncio.create_task(
        collect(rig.pipeline, chat("x", sampling=Sampling(max_tokens=20, n=2)))
    )
    await until(lambda: any(d.generations for d in decoders))
    (second,) = (d for d in decoders if not d.generations)

    async def heard(step: int) -> None:
        await until(lambda: second.generations[0].stopped)

    second.script = Script(token_ids=(71,) * 9, step_when=heard)
    known.set()
    events = await running
    assert second.generations[0].stopped == {0}
    assert [e.choice for e in events if isinstance(e, ChoiceDone)] == [0, 1]
    assert sum(len(e.token_ids) for e in events if isinstance(e, Delta)) == 1 + 9


async def test_a_decoder_that_dies_mid_stream_and_has_no_heir_fails_the_stream(
    make_rig: RigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.patience.PATIENCE_S", 0.2)
    decoder = FakeDecoder(Script(token_ids=(70,) * 9, die_after=3))
    rig = await make_rig(decoders=[decoder])
    seen: list[Event] = []
    with pytest.raises(Unavailable):
        async with aclosing(rig.pipeline.run(chat("x", sampling=Sampling(max_tokens=20)))) as es:
            async for event in es:
                seen.append(event)
    assert all(isinstance(event, Delta) for event in seen)
    assert [i for event in seen for i in event.token_ids] == [70] * 3  # type: ignore[union-attr]


async def test_a_long_clip_is_cut_into_runs(
    make_rig: RigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.routing.encoders.RUN_PATCHES", 64)
    monkeypatch.setattr("chiasm.runs.UNIT_PATCHES", 64)
    decoder = FakeDecoder(Script(lose=(Cause.LOST,)))
    rig = await make_rig(encoders=3, decoders=[decoder])
    data = clip(20, fps=4)
    part = MediaPart(Modality.VIDEO, data=data, param="p")
    events = await collect(rig.pipeline, chat(part, "what?"))
    assert isinstance(events[-1], JobDone)
    promise = Promise.from_proto(decoder.generations[0].start.promises[0])  # gapless, or it raises
    assert len(promise.parts) == 3
    assert [p.frames.begin for p in promise.parts[1:]] == [p.frames.end for p in promise.parts[:-1]]
    assert promise.parts[-1].frames.end == len(promise.plan.frame_indices)
    assert len({p.source.encode_id for p in promise.parts}) == 3
    told = {e.encode_id: e for encoder in rig.encoders for e in encoder.encodes}
    for sent in promise.parts:
        assert Span.from_proto(told[sent.source.encode_id].frames) == sent.frames
        assert Span.from_proto(told[sent.source.encode_id].rows) == sent.rows
    (redirect,) = decoder.generations[0].redirects  # part 0 was lost, it alone moves
    assert (redirect.part, redirect.attempt) == (0, 2)
    again = told[redirect.source.encode_id]
    assert Span.from_proto(again.frames) == promise.parts[0].frames
    assert rig.encodes() == 4
    await rig.settle()


class EagerDecoder(FakeDecoder):
    """Sends tokens before any item has landed (its prompt begins with text)."""

    async def _land(self, generation):  # noqa: ANN001, ANN202
        return
        yield
