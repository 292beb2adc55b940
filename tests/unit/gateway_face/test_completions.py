"""POST /v1/completions."""

from __future__ import annotations

import httpx
import pytest

from chiasm.errors import (
    Unavailable,
)
from gateway.messages import (
    RawJob,
)
from tests.unit.gateway_face.scripted import (
    COMPLETIONS,
    ScriptedPipeline,
    check_error,
    events_of,
)


async def test_completions_take_all_four_kinds_of_prompt(
    client: httpx.AsyncClient, pipeline: ScriptedPipeline
) -> None:
    for prompt, wanted in (
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([5, 6], [(5, 6)]),
        ([[5], [6]], [(5,), (6,)]),
    ):
        pipeline.jobs.clear()
        answer = await client.post(COMPLETIONS, json={"model": "demo", "prompt": prompt, "n": 2})
        jobs = [job for job in pipeline.jobs if isinstance(job, RawJob)]
        assert [job.prompt for job in jobs] == wanted
        assert len({job.request_id for job in jobs}) == len(jobs)
        assert jobs[0].sampling.max_tokens == 16
        choices = answer.json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(2 * len(wanted)))
        assert {choice["text"] for choice in choices} == {"red circle"}
        assert answer.json()["usage"]["prompt_tokens"] == 11 * len(wanted)


async def test_a_stream_over_several_prompts(client: httpx.AsyncClient) -> None:
    body = {"model": "demo", "prompt": ["a", "b"], "stream": True}
    chunks = events_of(await client.post(COMPLETIONS, json=body))
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == "red circle"
        assert mine[-1]["finish_reason"] == "stop"


async def test_one_failing_prompt_fails_the_request_and_ends_the_others(
    client: httpx.AsyncClient, pipeline: ScriptedPipeline
) -> None:
    pipeline.fail_after = (2, Unavailable("gone"))
    answer = await client.post(COMPLETIONS, json={"model": "demo", "prompt": ["a", "b", "c"]})
    check_error(answer, 503, "unavailable")
    assert len(pipeline.ends) == len(pipeline.jobs)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ({}, "prompt"),
        (None, "prompt"),
        ([1, "a"], "prompt[1]"),
        (["a", 1], "prompt[1]"),
        ([-1], "prompt[0]"),
        ([10**9], "prompt"),
        ([[1], [397]], "prompt[1]"),
    ],
)
async def test_bad_prompts(client: httpx.AsyncClient, prompt: object, param: str) -> None:
    answer = await client.post(COMPLETIONS, json={"model": "demo", "prompt": prompt})
    check_error(answer, 400, "invalid_request", param)
