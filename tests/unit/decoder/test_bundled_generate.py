"""Generate by way of a bundle: the same answers as alone, over real gRPC with a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from chiasm.channel import messages
from chiasm.v1 import common_pb2, decoder_pb2
from tests.checkpoints import save_tiny_qwen
from tests.unit.decoder.served import config_of, ids_of, serving

torch.set_num_threads(1)


@pytest.fixture(scope="module", name="model")
def model_(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen(tmp_path_factory.mktemp("tiny"))


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
