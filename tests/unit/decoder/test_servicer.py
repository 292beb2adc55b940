"""The decoder over real gRPC with a real tiny model, text only; and the process around it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from chiasm.channel import connect, messages
from chiasm.config import DecoderConfig
from chiasm.config.decoder import MemoryConfig, ParallelConfig, SchedulerConfig
from chiasm.digest import language_model_digest, tokenizer_digest, tower_digest
from chiasm.errors import ChiasmError, InvalidRequest, ResourceExhausted, TooLarge, Unavailable
from chiasm.server import Server
from chiasm.telemetry import DecoderMetrics
from chiasm.v1 import common_pb2, decoder_pb2, decoder_pb2_grpc
from decoder_svc.admission import room_of
from decoder_svc.app import describe, main
from decoder_svc.assembly import Parts, build_engine, load_parts, warm_up
from decoder_svc.config import read_text_config
from decoder_svc.engine.client import EngineClient, merge
from decoder_svc.engine.messages import AddRequest, ChoiceDone, FinishReason, StepPlan, Tokens
from decoder_svc.grammar_check import GrammarCheck
from decoder_svc.intake import Intake
from decoder_svc.sampling.params import SamplingParams
from decoder_svc.servicer import SERVICE_NAME, DecoderServicer
from tests.checkpoints import save_tiny_qwen
from tests.waiting import DEADLINE_S, until

torch.set_num_threads(1)


@pytest.fixture(scope="module", name="model")
def model_(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen(tmp_path_factory.mktemp("tiny"))


def config_of(model: Path, **changes: Any) -> DecoderConfig:
    memory = MemoryConfig(kv_blocks=64, block_size=4, slab_bytes=1 << 20)
    return DecoderConfig(**{"model": str(model), "memory": memory, **changes})


class Decoder:
    """A served engine."""

    def __init__(self, parts: Parts, client: EngineClient, address: str) -> None:
        self.parts = parts
        self.client = client
        self.channel = connect(address)
        self.stub = decoder_pb2_grpc.DecoderStub(self.channel)

    @contextmanager
    def held(self, *, after: int = 0) -> Iterator[None]:
        """Inside, the engine computes so many steps and no more."""
        executor, left, go_on = self.parts.executor, [None] * after, threading.Event()
        submit = executor.submit

        def held_back(plan: StepPlan) -> None:
            if left:
                left.pop()
            else:
                go_on.wait()
            submit(plan)

        executor.submit = held_back  # type: ignore[method-assign]
        try:
            yield
        finally:
            go_on.set()

    async def call(self, ids: list[int], request_id: str = "r", **sampling: Any) -> Any:
        call = self.stub.Generate()
        start = decoder_pb2.GenerateStart(
            context=common_pb2.RequestContext(request_id=request_id),
            prompt_token_ids=ids,
            sampling=decoder_pb2.SamplingParams(**sampling),
        )
        await call.write(decoder_pb2.GenerateRequest(start=start))
        return call

    async def generate(self, ids: list[int], **fields: Any) -> list[decoder_pb2.GenerateResponse]:
        call = await self.call(ids, **fields)
        await call.done_writing()
        return [message async for message in messages(call)]

    async def idle(self) -> None:
        await until(lambda: not (self.client.load.running or self.client.num_waiting))


@asynccontextmanager
async def serving(config: DecoderConfig) -> AsyncIterator[Decoder]:
    model = Path(config.model)
    text = read_text_config(model)
    parts = load_parts(config, text, model)
    warm_up(parts.executor, num_blocks=parts.num_blocks, block_size=config.memory.block_size)
    metrics = DecoderMetrics()
    client = EngineClient(
        max_waiting=config.scheduler.max_waiting_requests,
        room=room_of(
            config.scheduler,
            config.memory,
            pages=parts.num_blocks,
            row_bytes=parts.rows.row_bytes,
        ),
        metrics=metrics,
    )
    core = build_engine(config, parts, client.mailbox, metrics)
    server = Server("127.0.0.1", 0, drain_s=2.0)
    grammars = GrammarCheck(parts.grammars)
    servicer = DecoderServicer(
        grammars=grammars,
        intake=Intake(text, max_model_len=parts.max_model_len, max_choices=8),
        client=client,
        description=describe(config, text, parts, model, server.port),
        slab_page_bytes=parts.rows.row_bytes * config.memory.slab_page_rows,
        slab_pages=parts.slab_pages,
    )
    decoder_pb2_grpc.add_DecoderServicer_to_server(servicer, server.grpc)
    thread = threading.Thread(target=core.run)
    thread.start()
    await server.start((SERVICE_NAME,))
    decoder = Decoder(parts, client, server.address)
    try:
        yield decoder
    finally:
        await decoder.channel.close()
        await server.stop()
        await grammars.close()
        core.stop()
        thread.join()
        parts.executor.close()
        parts.slab.close()


def ids_of(told: list[decoder_pb2.GenerateResponse], choice: int = 0) -> list[int]:
    return [
        token
        for message in told
        if message.HasField("tokens") and message.tokens.choice == choice
        for token in message.tokens.token_ids
    ]


async def test_text_is_answered_and_summed_up(model: Path) -> None:
    async with serving(config_of(model)) as decoder:
        told = await decoder.generate([40, 41, 42], max_tokens=9, ignore_eos=True)
        kinds = [message.WhichOneof("kind") for message in told]
        assert kinds[0] == "accepted" and kinds[-2:] == ["finished", "done"]
        assert len(ids_of(told)) == 9
        assert told[-2].finished.reason == decoder_pb2.FINISH_REASON_LENGTH
        assert not told[-2].finished.HasField("stop_token_id")
        done = told[-1].done
        assert (done.prompt_tokens, done.completion_tokens) == (3, 9)
        assert done.prefill_ms > 0 and done.decode_ms > 0


async def test_the_stop_token_is_counted_but_not_sent(model: Path) -> None:
    async with serving(config_of(model)) as decoder:
        plain = ids_of(await decoder.generate([40, 41, 42], max_tokens=9, ignore_eos=True))
        stop = plain[4]
        first = plain.index(stop)
        told = await decoder.generate(
            [40, 41, 42], max_tokens=9, ignore_eos=True, stop_token_ids=[stop]
        )
        assert ids_of(told) == plain[:first]
        assert told[-2].finished.reason == decoder_pb2.FINISH_REASON_STOP
        assert told[-2].finished.stop_token_id == stop
        assert told[-1].done.completion_tokens == first + 1


async def test_calls_of_a_bundle_are_told_what_each_is_told_alone(model: Path) -> None:
    """Some stop early, some want logprobs, some have two choices: one stream, ids in order."""
    wishes: list[dict[str, Any]] = [
        {"max_tokens": 3 + 4 * (index % 4), "n": 1 + (index % 3 == 2), "ignore_eos": True}
        for index in range(10)
    ]
    wishes[4]["top_logprobs"] = 1
    prompts = [[40 + index, 41, 42] for index in range(10)]
    async with serving(config_of(model)) as decoder:
        alone = [
            await decoder.generate(ids, request_id=f"a{index}", **wish)
            for index, (ids, wish) in enumerate(zip(prompts, wishes, strict=True))
        ]
        bundle = common_pb2.Bundle()
        for index, (ids, wish) in enumerate(zip(prompts, wishes, strict=True)):
            start = decoder_pb2.GenerateStart(
                context=common_pb2.RequestContext(request_id=f"b{index}"),
                prompt_token_ids=ids,
                sampling=decoder_pb2.SamplingParams(**wish),
            )
            message = decoder_pb2.GenerateRequest(start=start).SerializeToString()
            bundle.strands.add(call=index + 1, message=message)
        call = decoder.stub.GenerateMany()
        await call.write(bundle)
        await call.done_writing()
        told: dict[int, list[decoder_pb2.GenerateResponse]] = {}
        async for answer in messages(call):
            for strand in answer.strands:
                assert not strand.HasField("error")
                if strand.HasField("message"):
                    response = decoder_pb2.GenerateResponse.FromString(strand.message)
                    told.setdefault(strand.call - 1, []).append(response)
    for index, before in enumerate(alone):
        for choice in range(wishes[index]["n"]):
            assert ids_of(told[index], choice) == ids_of(before, choice)
            assert _positions(told[index], choice) == list(range(wishes[index]["max_tokens"]))
        assert told[index][-1].HasField("done")


def _positions(told: list[decoder_pb2.GenerateResponse], choice: int) -> list[int]:
    deltas = [m.tokens for m in told if m.HasField("tokens") and m.tokens.choice == choice]
    return [delta.position + place for delta in deltas for place in range(len(delta.token_ids))]


async def test_logprobs_come_with_every_token(model: Path) -> None:
    async with serving(config_of(model)) as decoder:
        told = await decoder.generate([40, 41], max_tokens=5, ignore_eos=True, top_logprobs=2)
        for message in told:
            if message.HasField("tokens"):
                assert len(message.tokens.logprobs) == len(message.tokens.token_ids)
                for token, entry in zip(
                    message.tokens.token_ids, message.tokens.logprobs, strict=True
                ):
                    assert entry.top_ids[0] == token  # greedy
                    assert entry.logprob == entry.top_logprobs[0]


async def test_a_refusal_names_its_field_and_later_requests_succeed(model: Path) -> None:
    async with serving(config_of(model)) as decoder:
        for ids, sampling, kind in (
            ([99999], {}, InvalidRequest),
            ([40] * 500, {}, TooLarge),
            ([40], {"temperature": 7}, InvalidRequest),
        ):
            with pytest.raises(kind) as caught:
                await decoder.generate(ids, **sampling)
            assert caught.value.param
        call = decoder.stub.Generate()
        await call.write(decoder_pb2.GenerateRequest(stop_choice=decoder_pb2.StopChoice()))
        with pytest.raises(InvalidRequest, match="first message"):
            await anext(messages(call))
        assert len(ids_of(await decoder.generate([40], max_tokens=2, ignore_eos=True))) == 2


async def test_a_cancelled_call_frees_everything(model: Path) -> None:
    async with serving(config_of(model)) as decoder:
        call = await decoder.call([40, 41], max_tokens=200, ignore_eos=True, n=3)
        stream = messages(call)
        for _ in range(4):
            await anext(stream)
        call.cancel()
        await decoder.idle()
        await until(lambda: decoder.client.load.kv_usage_ratio == 0)


async def test_a_deadline_frees_everything(model: Path) -> None:
    async with serving(config_of(model)) as decoder:
        call = decoder.stub.Generate(timeout=0.15)
        start = decoder_pb2.GenerateStart(
            prompt_token_ids=[40],
            sampling=decoder_pb2.SamplingParams(max_tokens=255, ignore_eos=True),
        )
        await call.write(decoder_pb2.GenerateRequest(start=start))
        with pytest.raises(ChiasmError):
            while True:
                async for _ in messages(call):
                    pass
                call = decoder.stub.Generate(timeout=0.01)
        await decoder.idle()


async def test_stop_choice_ends_one_and_a_second_start_is_refused(model: Path) -> None:
    async with serving(config_of(model)) as decoder:
        stopped = []
        tell = decoder.client.tell
        decoder.client.tell = lambda command: (tell(command), stopped.append(command))  # type: ignore[method-assign, func-returns-value]
        with decoder.held():
            call = await decoder.call([40, 41], max_tokens=60, ignore_eos=True, n=2)
            stop = decoder_pb2.GenerateRequest(stop_choice=decoder_pb2.StopChoice(choice=1))
            await call.write(stop)
            await until(lambda: stopped)
        told = [message async for message in messages(call)]
        reasons = {m.finished.choice: m.finished.reason for m in told if m.HasField("finished")}
        assert reasons[0] == decoder_pb2.FINISH_REASON_LENGTH
        assert len(ids_of(told)) == 60
        assert reasons[1] == decoder_pb2.FINISH_REASON_STOP
        call = await decoder.call([40, 41], max_tokens=200, ignore_eos=True)
        await call.write(decoder_pb2.GenerateRequest(start=decoder_pb2.GenerateStart()))
        with pytest.raises(InvalidRequest, match="after start"):
            async for _ in messages(call):
                pass
        await decoder.idle()


async def test_a_full_decoder_refuses_before_accepting(model: Path) -> None:
    limits = SchedulerConfig(max_running_requests=1, max_waiting_requests=2)
    async with serving(config_of(model, scheduler=limits)) as decoder:
        with decoder.held():
            calls = [
                await decoder.call([40], f"r{i}", max_tokens=250, ignore_eos=True) for i in range(8)
            ]
            firsts = await asyncio.gather(
                *(anext(messages(call)) for call in calls), return_exceptions=True
            )
        refused = [first for first in firsts if isinstance(first, ResourceExhausted)]
        assert 5 <= len(refused) <= 6
        assert all(error.retry_after_s for error in refused)
        for call in calls:
            call.cancel()
        await decoder.idle()


async def test_a_decoder_refuses_what_its_pages_will_not_hold_for_long(model: Path) -> None:
    limits = SchedulerConfig(max_waiting_tokens=64)
    async with serving(config_of(model, scheduler=limits)) as decoder:
        admission = decoder.client.admission
        waiting = AddRequest(
            request_id="w", prompt_ids=(40,) * 64, sampling=SamplingParams(max_tokens=1)
        )
        place = admission.enter(waiting)
        with pytest.raises(ResourceExhausted, match="KV pages"):
            await decoder.generate([40], max_tokens=2)
        place.leave()
        assert len(ids_of(await decoder.generate([40], max_tokens=2, ignore_eos=True))) == 2
        await decoder.idle()
        admission.check()
        assert admission.waiting_pages == 0


async def test_a_draining_decoder_takes_nothing_new_and_finishes_the_rest(model: Path) -> None:
    async with serving(config_of(model)) as decoder:
        call = await decoder.call([40], max_tokens=100, ignore_eos=True)
        stream = messages(call)
        await anext(stream)
        decoder.client.draining = True
        with pytest.raises(Unavailable):
            await decoder.generate([40])
        assert len(ids_of([message async for message in stream])) == 100


async def test_one_request_id_twice_is_two_requests(model: Path) -> None:
    async with serving(config_of(model)) as decoder:
        answers = await asyncio.gather(
            *(decoder.generate([40 + i], max_tokens=20, ignore_eos=True) for i in range(3))
        )
        for i, told in enumerate(answers):
            again = await decoder.generate([40 + i], max_tokens=20, ignore_eos=True)
            assert ids_of(told) == ids_of(again)


async def test_describe_and_load(model: Path) -> None:
    async with serving(config_of(model)) as decoder:
        said = await decoder.stub.Describe(common_pb2.DescribeRequest())
        assert (said.role, said.family, said.vocab_size) == ("decoder", "qwen2_5_vl", 448)
        assert said.max_model_len == 256  # 64 pages of 4, fewer than the model's positions
        assert said.rows == common_pb2.RowFormat(
            hidden_size=64, levels=1, dtype=common_pb2.DTYPE_FLOAT32
        )
        assert said.digests == common_pb2.Digests(
            tower=tower_digest(model),
            tokenizer=tokenizer_digest(model),
            language_model=language_model_digest(model),
        )
        watch = decoder.stub.WatchLoad(common_pb2.WatchLoadRequest(interval_ms=50))
        assert (await watch.read()).embedding_bytes_total > 0
        with decoder.held(after=3):
            call = await decoder.call([40], max_tokens=250, ignore_eos=True)
            async with asyncio.timeout(DEADLINE_S):
                while not (load := await watch.read()).kv_usage_ratio:
                    pass
            assert load.running == 1
        watch.cancel()
        call.cancel()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": ParallelConfig(tp_size=3)}, "attention heads: 4 .* --tp-size 3"),
        ({"parallel": ParallelConfig(pp_size=5)}, "4 layers cannot fill 5"),
        ({"dtype": "int8"}, "--dtype"),
        ({"max_model_len": 5000}, "--max-model-len"),
        ({"memory": MemoryConfig(kv_bytes=10)}, "no room for K and V"),
        ({"memory": MemoryConfig(kv_blocks=8, slab_bytes=20000)}, "--slab-bytes"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    model: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        main(config_of(model, **changes))


def test_neighbouring_tokens_become_one_message() -> None:
    done = ChoiceDone(0, FinishReason.LENGTH)
    events = [Tokens(0, 0, (1,)), Tokens(0, 1, (2,)), Tokens(1, 0, (3,)), Tokens(0, 2, (4,)), done]
    assert merge(events) == [
        Tokens(0, 0, (1, 2)),
        Tokens(1, 0, (3,)),
        Tokens(0, 2, (4,)),
        done,
    ]
