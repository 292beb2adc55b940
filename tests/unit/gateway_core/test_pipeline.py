"""The life of a request over fakes: what is called, in which order, and what the client gets."""

from __future__ import annotations

import asyncio
import gc
import sys
from dataclasses import replace

import pytest

from chiasm.config.gateway import AdmissionConfig, MediaConfig
from chiasm.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    ResourceExhausted,
    TooLarge,
)
from chiasm.fakes import EncoderFaults, FakeDecoder, FakeEncoder, Script
from chiasm.plan import MediaPlan
from chiasm.v1 import decoder_pb2
from gateway.messages import (
    ChoiceDone,
    Delta,
    FinishReason,
    Guide,
    GuideKind,
    JobDone,
    MediaOptions,
    Message,
    RawJob,
    Role,
    Sampling,
    TextPart,
)
from gateway.prompt import PromptBuilder
from tests.unit.gateway_core.conftest import (
    MODEL_DIR,
    RigMaker,
    chat,
    collect,
    never,
    picture,
    png,
)
from tests.waiting import until


async def undecided(plan: MediaPlan, media: bytes) -> None:
    """An encoder's judge that never says anything."""
    await asyncio.Event().wait()


async def forever(step: int) -> None:
    """Of a decoder that makes no step."""
    await asyncio.Event().wait()


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


async def test_a_request_may_show_more_than_its_encoder_holds(make_rig: RigMaker) -> None:
    encoder = FakeEncoder(faults=EncoderFaults(most_open=2))

    async def whatever(promise: decoder_pb2.Promise) -> None:
        """The fake lands item by item; the encoder may have others."""

    script = Script(land_s=0.5, land_when=whatever, landed_when=whatever)
    rig = await make_rig(encoders=[encoder], decoders=[FakeDecoder(script)])
    colors = ("red", "green", "blue", "white", "black", "gray", "cyan")
    pictures = [picture(png(color), index) for index, color in enumerate(colors)]
    events = await collect(rig.pipeline, chat(*pictures))
    assert isinstance(events[-1], JobDone)
    await rig.settle()
    encoder.faults.most_open = 0  # held by others
    rig.pipeline.admission.queue_timeout_s = 0.0
    with pytest.raises(ResourceExhausted):
        await collect(rig.pipeline, chat(picture(png("pink"))))


async def test_n_choices_share_one_encode_and_end_each(make_rig: RigMaker) -> None:
    script = Script(per_choice={0: (70, 71), 1: (72,), 2: (73, 74, 75)})
    rig = await make_rig(decoders=[FakeDecoder(script)])
    events = await collect(rig.pipeline, chat(picture(png()), sampling=Sampling(max_tokens=8, n=3)))
    assert rig.encodes() == 1
    done = [e for e in events if isinstance(e, ChoiceDone)]
    assert sorted(e.choice for e in done) == [0, 1, 2]
    assert len({text_of(events, c) for c in range(3)}) == 3


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

    async def heard(step: int) -> None:
        if step == len(ids) - 1:
            await until(lambda: decoder.generations[0].stopped)

    decoder = FakeDecoder(Script(token_ids=ids, step_when=heard))
    rig = await make_rig(decoders=[decoder])
    job = chat("x", sampling=Sampling(max_tokens=100), stop=("three",))
    events = await collect(rig.pipeline, job)
    assert text_of(events) == "one two "
    assert [e for e in events if isinstance(e, ChoiceDone)] == [ChoiceDone(0, FinishReason.STOP)]
    assert decoder.generations[0].stopped == {0}


async def test_closing_the_stream_cancels_everything(make_rig: RigMaker) -> None:
    """Ten times: peers are still being watched when the first begins, which takes tasks too."""
    times = 10
    decoder = FakeDecoder(Script(token_ids=tuple(range(1, 200)), token_s=0.02))
    rig = await make_rig(decoders=[decoder])

    async def break_off() -> None:
        events = rig.pipeline.run(chat(picture(png()), sampling=Sampling(max_tokens=500)))
        await anext(events)
        assert rig.pipeline.admission.inflight == 1
        await events.aclose()

    await break_off()  # the streams that calls share stay open
    before = len(asyncio.all_tasks())
    for _ in range(times):
        await break_off()
    await rig.settle()
    rig.pipeline.admission.check()
    assert rig.pipeline.admission.inflight == rig.pipeline.admission.media_bytes == 0
    await until(lambda: len(asyncio.all_tasks()) < before + times)  # grpc's own end a little later


@pytest.mark.parametrize("bundled", [True, False])
async def test_media_go_with_their_request_and_wait_for_no_collection(
    make_rig: RigMaker, bundled: bool
) -> None:
    rig = await make_rig(
        encoders=[FakeEncoder(bundled=bundled)], decoders=[FakeDecoder(bundled=bundled)]
    )
    gc.collect()
    gc.disable()
    try:
        data = png()
        before = sys.getrefcount(data)
        await collect(rig.pipeline, chat("what?", picture(data)))
        await until(lambda: sys.getrefcount(data) <= before)
    finally:
        gc.enable()


async def test_cancelling_before_the_first_event_cancels_everything(make_rig: RigMaker) -> None:
    rig = await make_rig(decoders=[FakeDecoder(Script(land_when=never, step_when=forever))])
    rig.encoders[0].faults.judge = undecided
    running = asyncio.create_task(collect(rig.pipeline, chat(picture(png()))))
    await until(lambda: rig.encodes() and rig.decoders[0].running)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await rig.settle()
    assert rig.pipeline.admission.inflight == 0


async def test_deadline(make_rig: RigMaker) -> None:
    rig = await make_rig(decoders=[FakeDecoder(Script(step_when=forever))])
    with pytest.raises(DeadlineExceeded):
        await collect(rig.pipeline, chat("x", timeout_s=0.3))
    await rig.settle()


async def test_admission(make_rig: RigMaker) -> None:
    """Pictures fill three quarters of the slots; text still comes in."""
    encoder = FakeEncoder(faults=EncoderFaults(judge=undecided))
    script = Script(token_ids=(70,), land_when=never)
    rig = await make_rig(
        encoders=[encoder],
        decoders=[FakeDecoder(script)],
        admission=AdmissionConfig(max_inflight=4, queue_timeout_s=0.2),
    )
    running = [
        asyncio.create_task(collect(rig.pipeline, chat(picture(png(), i)))) for i in range(3)
    ]
    await until(lambda: rig.pipeline.admission.inflight == 3)
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


async def test_a_slow_encoder_does_not_slow_text_down(make_rig: RigMaker) -> None:
    """No picture gets on before the text that comes after them all is answered."""
    answered = asyncio.Event()

    async def judge(plan: MediaPlan, media: bytes) -> None:
        await answered.wait()

    async def landed_when(promise: decoder_pb2.Promise) -> None:
        await encoder.made(promise.parts[0].source.encode_id)

    encoder = FakeEncoder(faults=EncoderFaults(judge=judge))
    decoder = FakeDecoder(Script(token_ids=(70, 71), landed_when=landed_when))
    rig = await make_rig(encoders=[encoder], decoders=[decoder])
    colors = [f"#{index:02x}8040" for index in range(24)]
    pictures = [
        asyncio.create_task(collect(rig.pipeline, chat(picture(png(color))))) for color in colors
    ]
    await until(lambda: len(encoder.encodes) == len(colors))
    texts = await asyncio.gather(*(collect(rig.pipeline, chat("hello")) for _ in colors))
    assert not any(task.done() for task in pictures)
    answered.set()
    done = await asyncio.gather(*pictures)
    assert all(isinstance(events[-1], JobDone) for events in (*texts, *done))
    assert rig.pipeline.admission.media_bytes == 0
    await rig.settle()


async def test_a_form_is_only_asked_of_decoders_that_know_forms(make_rig: RigMaker) -> None:
    rig = await make_rig()
    form = Guide(GuideKind.JSON_SCHEMA, {"type": "object"}, "response_format")
    with pytest.raises(InvalidRequest) as refused:
        await collect(rig.pipeline, chat("hello", guide=form))
    assert refused.value.param == "response_format"
    assert not rig.decoders[0].generations
    able = FakeDecoder()
    rig = await make_rig(decoders=[able], features=("grammar",))
    await collect(rig.pipeline, chat("hello", guide=form))
    grammar = able.generations[0].start.sampling.grammar
    assert (grammar.json_schema, grammar.param) == ('{"type": "object"}', "response_format")


async def test_bounds_of_one_medium_hold_for_it_alone(make_rig: RigMaker) -> None:
    rig = await make_rig()
    parts = [picture(png()), replace(picture(png()), options=MediaOptions(max_pixels=56 * 56))]
    await collect(rig.pipeline, chat("what?", *parts))
    large, small = rig.decoders[0].generations[0].start.promises
    assert small.plan.num_rows == 4 < large.plan.num_rows


async def test_the_last_message_is_gone_on_with(make_rig: RigMaker) -> None:
    rig = await make_rig()
    job = chat("hello")
    begun = Message(Role.ASSISTANT, (TextPart("It is a "),))
    await collect(rig.pipeline, replace(job, messages=(*job.messages, begun), continue_final=True))
    await collect(rig.pipeline, replace(job, add_generation_prompt=False))
    open_turn, closed = (g.start.prompt_token_ids for g in rig.decoders[0].generations)
    decode = PromptBuilder(MODEL_DIR).vocabulary.decode
    assert decode(open_turn, skip_special=False).endswith("<|im_start|>assistant\nIt is a ")
    assert decode(closed, skip_special=False).endswith("hello<|im_end|>\n")
