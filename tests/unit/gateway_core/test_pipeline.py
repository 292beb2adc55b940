"""The life of a request over fakes: what is called, in which order, and what the client gets."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from chiasm.config.gateway import AdmissionConfig, MediaConfig
from chiasm.errors import (
    DeadlineExceeded,
    EmbeddingLost,
    InvalidMedia,
    InvalidRequest,
    ModelNotFound,
    ResourceExhausted,
    TooLarge,
    Unavailable,
)
from chiasm.fakes import EncoderFaults, FakeDecoder, FakeEncoder, Script
from chiasm.plan import Cause
from gateway.messages import ChoiceDone, Delta, FinishReason, JobDone, RawJob, Sampling
from tests.unit.gateway_core.conftest import RigMaker, chat, collect, picture, png


def text_of(events: list, choice: int = 0) -> str:
    return "".join(e.text for e in events if isinstance(e, Delta) and e.choice == choice)


async def test_text_touches_no_encoder(make_rig: RigMaker) -> None:
    rig = await make_rig()
    events = await collect(rig.pipeline, chat("hello"))
    assert rig.encodes() == 0
    assert isinstance(events[-1], JobDone)
    assert events[-2] == ChoiceDone(0, FinishReason.STOP)
    assert events[-1].usage.completion_tokens == 3
    assert rig.decoders[0].generations[0].start.sampling.seed > 0


async def test_picture_is_encoded_and_promised(make_rig: RigMaker) -> None:
    rig = await make_rig()
    events = await collect(rig.pipeline, chat("what?", picture(png())))
    start = rig.decoders[0].generations[0].start
    (promise,) = start.promises
    encode = rig.encoders[0].encodes[0]
    source = promise.parts[0].source
    assert source.encode_id == encode.encode_id
    assert source.encoder_epoch == rig.encoders[0].epoch
    assert source.endpoint == rig.servers[id(rig.encoders[0])].address
    rows = promise.plan.num_rows
    run = start.prompt_token_ids[promise.prompt_offset : promise.prompt_offset + rows]
    assert set(run) == {396}  # the demo's image token, once per row
    assert start.prompt_token_ids[promise.prompt_offset + rows] != 396
    assert encode.plan == promise.plan
    assert events[-1].timings.first_token > 0
    await rig.settle()


async def test_same_picture_thrice_is_encoded_once(make_rig: RigMaker) -> None:
    rig = await make_rig(encoders=2)
    red = png()
    await collect(
        rig.pipeline,
        chat(
            picture(red, 0),
            "a",
            picture(red, 1),
            picture(png("blue"), 2),
            picture(bytes(bytearray(red)), 3),
        ),
    )
    promises = rig.decoders[0].generations[0].start.promises
    assert rig.encodes() == 2
    ids = [p.parts[0].source.encode_id for p in promises]
    assert ids[0] == ids[1] == ids[3] != ids[2]
    assert [p.item for p in promises] == [0, 1, 2, 3]
    await rig.settle()


async def test_n_choices_share_one_encode_and_end_each(make_rig: RigMaker) -> None:
    script = Script(per_choice={0: (70, 71), 1: (72,), 2: (73, 74, 75)})
    rig = await make_rig(decoders=[FakeDecoder(script)])
    events = await collect(rig.pipeline, chat(picture(png()), sampling=Sampling(max_tokens=8, n=3)))
    assert rig.encodes() == 1
    done = [e for e in events if isinstance(e, ChoiceDone)]
    assert sorted(e.choice for e in done) == [0, 1, 2]
    assert len({text_of(events, c) for c in range(3)}) == 3


async def test_broken_picture_is_refused_before_any_event(make_rig: RigMaker) -> None:
    encoder = FakeEncoder(faults=EncoderFaults(fail=Cause.INVALID_MEDIA, delay_s=0.1))
    rig = await make_rig(encoders=[encoder], decoders=[FakeDecoder(Script(land_s=5.0))])
    with pytest.raises(InvalidMedia) as failure:
        await collect(rig.pipeline, chat("x", picture(png(), 1)))
    assert failure.value.param == "messages[0].content[1]"
    assert len(encoder.encodes) == 1  # a bad file does not walk from replica to replica
    await rig.settle()


async def test_first_event_waits_for_every_item(make_rig: RigMaker) -> None:
    """The decoder already sends tokens, but the second picture is not decoded yet."""
    encoder = FakeEncoder(faults=EncoderFaults(delay_s=0.3))
    decoder = EagerDecoder(Script())
    rig = await make_rig(encoders=[encoder], decoders=[decoder])
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with aclosing(rig.pipeline.run(chat(picture(png())))) as events:
        await anext(events)
        assert loop.time() - began >= 0.3


async def test_lost_rows_are_encoded_elsewhere(make_rig: RigMaker) -> None:
    decoder = FakeDecoder(Script(lose=(Cause.LOST,), land_s=0.05))
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
    decoder = FakeDecoder(Script(lose=(Cause.PREEMPTED,) * 5, land_s=0.01))
    rig = await make_rig(decoders=[decoder])
    events = await collect(rig.pipeline, chat(picture(png())))
    assert isinstance(events[-1], JobDone)
    assert [r.attempt for r in decoder.generations[0].redirects] == [2, 3, 4, 5, 6]
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
    encoders = [FakeEncoder(faults=EncoderFaults(delay_s=30.0)) for _ in range(2)]
    decoder = FakeDecoder(Script(land_s=0.5))
    rig = await make_rig(encoders=encoders, decoders=[decoder])
    running = asyncio.create_task(collect(rig.pipeline, chat(picture(png()))))
    while not rig.encodes():
        await asyncio.sleep(0.01)
    (hit,) = (e for e in encoders if e.encodes)
    (other,) = (e for e in encoders if e is not hit)
    other.faults.delay_s = 0.0
    await rig.servers[id(hit)].grpc.stop(0)
    events = await running
    assert isinstance(events[-1], JobDone)
    assert len(other.encodes) == 1
    assert [r.attempt for r in decoder.generations[0].redirects] == [2]


async def test_a_full_encoder_passes_to_the_next_and_all_full_is_429(make_rig: RigMaker) -> None:
    encoders = [FakeEncoder(faults=EncoderFaults(exhausted=True)) for _ in range(2)]
    decoder = FakeDecoder(Script(land_s=1.0))
    rig = await make_rig(encoders=encoders, decoders=[decoder])
    with pytest.raises(ResourceExhausted) as failure:
        await collect(rig.pipeline, chat(picture(png())))
    assert failure.value.retry_after_s
    assert [len(e.encodes) for e in encoders] == [1, 1]


async def test_long_prompts_are_refused_before_any_encoder(make_rig: RigMaker) -> None:
    rig = await make_rig(model_len=32)
    with pytest.raises(InvalidRequest, match="tokens"):
        await collect(rig.pipeline, chat("many words " * 30, picture(png())))
    assert rig.encodes() == 0
    assert not rig.decoders[0].generations


async def test_max_tokens_defaults_to_the_room_that_is_left(make_rig: RigMaker) -> None:
    rig = await make_rig(model_len=100)
    await collect(rig.pipeline, chat("hi", sampling=Sampling()))
    await collect(rig.pipeline, chat("hi", sampling=Sampling(max_tokens=10**9)))
    for generation in rig.decoders[0].generations:
        start = generation.start
        assert start.sampling.max_tokens == 100 - len(start.prompt_token_ids)


async def test_stop_strings_end_a_choice(make_rig: RigMaker, prompts) -> None:
    ids = prompts.encode_text("one two three four five six")
    decoder = FakeDecoder(Script(token_ids=ids, token_s=0.01))
    rig = await make_rig(decoders=[decoder])
    job = chat("x", sampling=Sampling(max_tokens=100), stop=("three",))
    events = await collect(rig.pipeline, job)
    assert text_of(events) == "one two "
    assert [e for e in events if isinstance(e, ChoiceDone)] == [ChoiceDone(0, FinishReason.STOP)]
    assert decoder.generations[0].stopped == {0}


async def test_closing_the_stream_cancels_everything(make_rig: RigMaker) -> None:
    decoder = FakeDecoder(Script(token_ids=tuple(range(1, 200)), token_s=0.02))
    rig = await make_rig(decoders=[decoder])
    before = len(asyncio.all_tasks())
    events = rig.pipeline.run(chat(picture(png()), sampling=Sampling(max_tokens=500)))
    await anext(events)
    assert rig.pipeline.admission.inflight == 1
    await events.aclose()
    await rig.settle()
    rig.pipeline.admission.check()
    assert rig.pipeline.admission.inflight == rig.pipeline.admission.media_bytes == 0
    async with asyncio.timeout(5):  # grpc's own tasks end a little later
        while len(asyncio.all_tasks()) > before:
            await asyncio.sleep(0.02)


async def test_cancelling_before_the_first_event_cancels_everything(make_rig: RigMaker) -> None:
    encoder = FakeEncoder(faults=EncoderFaults(delay_s=30))
    rig = await make_rig(encoders=[encoder], decoders=[FakeDecoder(Script(land_s=30))])
    running = asyncio.create_task(collect(rig.pipeline, chat(picture(png()))))
    while not (rig.encodes() and rig.decoders[0].running):
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await rig.settle()
    assert rig.pipeline.admission.inflight == 0


async def test_a_decoder_that_fails_before_the_first_token_is_replaced(
    make_rig: RigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.patience.PATIENCE_S", 0.2)
    decoders = [FakeDecoder(Script(refuse=Unavailable("down"))) for _ in range(2)]
    rig = await make_rig(decoders=decoders)
    with pytest.raises(Unavailable):
        await collect(rig.pipeline, chat("x"))
    decoders[1].script.refuse = None
    await asyncio.sleep(0.6)  # the back-off
    events = await collect(rig.pipeline, chat("x", picture(png())))
    assert isinstance(events[-1], JobDone)
    await rig.settle()


async def test_a_request_outlives_its_decoder(make_rig: RigMaker, prompts) -> None:  # noqa: ANN001
    ids = prompts.encode_text("one two three four five six")
    scripts = [Script(token_ids=ids, die_after=4, token_s=0.02) for _ in range(2)]
    decoders = [FakeDecoder(script) for script in scripts]
    rig = await make_rig(decoders=decoders)
    job = chat("x", picture(png()), sampling=Sampling(max_tokens=100, n=2))
    running = asyncio.create_task(collect(rig.pipeline, job))
    while not any(d.generations for d in decoders):
        await asyncio.sleep(0.005)
    (second,) = (d for d in decoders if not d.generations)
    second.script.die_after = None
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


async def test_a_choice_that_had_ended_is_stopped_at_the_next_decoder(make_rig: RigMaker) -> None:
    script = Script(per_choice={0: (70,), 1: (71,) * 9}, die_after=3, token_s=0.02)
    decoders = [FakeDecoder(script), FakeDecoder(script)]
    rig = await make_rig(decoders=decoders)
    running = asyncio.create_task(
        collect(rig.pipeline, chat("x", sampling=Sampling(max_tokens=20, n=2)))
    )
    while not any(d.generations for d in decoders):
        await asyncio.sleep(0.005)
    (second,) = (d for d in decoders if not d.generations)
    second.script = Script(token_ids=(71,) * 9, token_s=0.02)
    events = await running
    assert second.generations[0].stopped == {0}
    assert [e.choice for e in events if isinstance(e, ChoiceDone)] == [0, 1]
    assert sum(len(e.token_ids) for e in events if isinstance(e, Delta)) == 1 + 9


async def test_a_decoder_that_dies_mid_stream_and_has_no_heir_fails_the_stream(
    make_rig: RigMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.patience.PATIENCE_S", 0.2)
    decoder = FakeDecoder(Script(token_ids=(70,) * 9, die_after=3, token_s=0.02))
    rig = await make_rig(decoders=[decoder])
    seen = []
    with pytest.raises(Unavailable):
        async with aclosing(rig.pipeline.run(chat("x", sampling=Sampling(max_tokens=20)))) as es:
            async for event in es:
                seen.append(event)
    assert len(seen) == 3


async def test_deadline(make_rig: RigMaker) -> None:
    rig = await make_rig(decoders=[FakeDecoder(Script(land_s=30, token_s=30))])
    with pytest.raises(DeadlineExceeded):
        await collect(rig.pipeline, chat("x", timeout_s=0.3))
    await rig.settle()


async def test_admission(make_rig: RigMaker) -> None:
    """Pictures fill three quarters of the slots; text still comes in."""
    encoder = FakeEncoder(faults=EncoderFaults(delay_s=30))
    script = Script(token_ids=(70,), land_s=30)
    rig = await make_rig(
        encoders=[encoder],
        decoders=[FakeDecoder(script)],
        admission=AdmissionConfig(max_inflight=4),
    )
    running = [
        asyncio.create_task(collect(rig.pipeline, chat(picture(png(), i)))) for i in range(3)
    ]
    while rig.pipeline.admission.inflight < 3:
        await asyncio.sleep(0.01)
    with pytest.raises(ResourceExhausted):
        await collect(rig.pipeline, chat(picture(png())))
    events = await collect(rig.pipeline, chat("text"))
    assert isinstance(events[-1], JobDone)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert rig.pipeline.admission.inflight == 0


async def test_media_bytes_are_counted_and_released(make_rig: RigMaker) -> None:
    size = len(png())
    rig = await make_rig(media=MediaConfig(max_bytes_in_flight=size))
    with pytest.raises(ResourceExhausted):
        await collect(rig.pipeline, chat(picture(png("red"), 0), picture(png("blue"), 1)))
    await collect(rig.pipeline, chat(picture(png())))
    assert rig.pipeline.admission.media_bytes == 0


async def test_limits(make_rig: RigMaker) -> None:
    rig = await make_rig(
        media=MediaConfig(limit_mm_per_prompt=("image=2",), max_request_pixels=20_000)
    )
    three = [picture(png(), index) for index in range(3)]
    with pytest.raises(InvalidRequest) as failure:
        await collect(rig.pipeline, chat(*three))
    assert failure.value.param == "messages[0].content[2]"
    with pytest.raises(TooLarge, match="pixels after resizing"):
        await collect(rig.pipeline, chat(*three[:2]))
    assert rig.encodes() == 0
    with pytest.raises(ModelNotFound):
        await collect(rig.pipeline, chat("x", model="other"))


async def test_raw_job(make_rig: RigMaker) -> None:
    rig = await make_rig()
    job = RawJob(request_id="r", model="demo", sampling=Sampling(max_tokens=4), prompt=(5, 6, 7))
    await collect(rig.pipeline, job)
    assert list(rig.decoders[0].generations[0].start.prompt_token_ids) == [5, 6, 7]
    with pytest.raises(InvalidRequest):
        await collect(
            rig.pipeline,
            RawJob(request_id="r", model="demo", sampling=Sampling(), prompt=(10**6,)),
        )


async def test_salt_and_options_change_the_digest(make_rig: RigMaker) -> None:
    rig = await make_rig()
    for salt in (b"", b"a", b"b", b"a"):
        await collect(rig.pipeline, chat(picture(png()), tenant_salt=salt))
    digests = [g.start.promises[0].plan.digest for g in rig.decoders[0].generations]
    assert len(set(digests)) == 3
    assert digests[1] == digests[3]


class EagerDecoder(FakeDecoder):
    """Sends tokens before any item has landed (its prompt begins with text)."""

    async def _land(self, generation):  # noqa: ANN001, ANN202
        return
        yield
