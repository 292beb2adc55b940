"""The decoder over real gRPC with a real tiny model, text only; and the process around it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from chiasm.channel import messages
from chiasm.config.decoder import MemoryConfig, ParallelConfig, SchedulerConfig
from chiasm.digest import language_model_digest, tokenizer_digest, tower_digest
from chiasm.errors import ChiasmError, InvalidRequest, ResourceExhausted, TooLarge, Unavailable
from chiasm.v1 import common_pb2, decoder_pb2
from decoder_svc.app import main
from decoder_svc.engine.client import merge
from decoder_svc.engine.messages import AddRequest, ChoiceDone, FinishReason, Tokens
from decoder_svc.sampling.params import SamplingParams
from tests.checkpoints import save_tiny_qwen
from tests.unit.decoder.served import config_of, ids_of, serving
from tests.waiting import DEADLINE_S, until

torch.set_num_threads(1)


@pytest.fixture(scope="module", name="model")
def model_(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen(tmp_path_factory.mktemp("tiny"))


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
