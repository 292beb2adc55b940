"""The decoder as it runs on a GPU says what the plain one says, as far as bfloat16 can tell."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bench.engine import Answer, BenchEngine, finish, random_prompts
from bench.shapes import write_shape
from chiasm.config.decoder import DecoderConfig, MemoryConfig, SchedulerConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS = (
    1,
    2,
    15,
    16,
    17,
    31,
    63,
    100,
    128,
    129,
    200,
    255,
    256,
    300,
    333,
    400,
    512,
    600,
    640,
    700,
)
TOKENS = 64


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shape(tmp_path_factory.mktemp("shape"), num_layers=4)


def answers(
    shape: Path, *, dtype: str, attention: str, graphs: bool, ahead: str, chunk: int = 512
) -> list[Answer]:
    config = DecoderConfig(
        model=str(shape),
        dtype=dtype,
        attention_backend=attention,
        cuda_graphs=graphs,
        load_format="dummy",
        max_model_len=2048,
        memory=MemoryConfig(kv_blocks=2048),
        scheduler=SchedulerConfig(
            max_running_requests=32, chunked_prefill_size=chunk, async_scheduling=ahead
        ),
    )
    engine = BenchEngine(config, shape)
    try:
        rng = np.random.default_rng(3)
        prompts = [random_prompts(1, n, vocabulary=152064, rng=rng)[0] for n in LENGTHS]
        asked = [engine.ask(prompt, TOKENS, top_logprobs=5) for prompt in prompts]
        return [finish(answer) for answer in asked]
    finally:
        engine.close()


def compare(found: list[Answer], expected: list[Answer]) -> tuple[float, int, int]:
    """The largest difference of a logprob both told, tokens compared, and wrong ones.

    Answers are compared up to where they part; parting is wrong only if the two tokens were
    further apart than rounding can explain.
    """
    noise, compared, wrong = 0.0, 0, 0
    for ours, theirs in zip(found, expected, strict=True):
        for index, (token, other) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=True)):
            told = dict(zip(theirs.top_ids[index], theirs.top_logprobs[index], strict=True))
            same = zip(ours.top_ids[index], ours.top_logprobs[index], strict=True)
            shared = [abs(value - told[key]) for key, value in same if key in told]
            noise = max(noise, *shared, 0.0)
            compared += 1
            if token != other:
                wrong += told.get(token, -100.0) < theirs.logprobs[index] - 0.1
                break
    return noise, compared, wrong


def test_graphs_and_kernels_against_plain_float32(shape: Path) -> None:
    exact = answers(shape, dtype="float32", attention="reference", graphs=False, ahead="off")
    plain = answers(shape, dtype="bfloat16", attention="reference", graphs=False, ahead="off")
    for graphs in (False, True):
        fast = answers(shape, dtype="bfloat16", attention="flashinfer", graphs=graphs, ahead="on")
        noise, compared, wrong = compare(fast, exact)
        print(f"graphs {graphs}: against float32 {noise:.4f} over {compared} tokens")
        assert not wrong
        assert noise < 0.15
        near, compared, wrong = compare(fast, plain)
        print(f"graphs {graphs}: against bfloat16 reference {near:.4f} over {compared} tokens")
        assert not wrong
    assert sum(len(a.token_ids) for a in fast) == len(LENGTHS) * TOKENS
