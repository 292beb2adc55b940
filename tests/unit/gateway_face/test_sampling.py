"""Every setting's edges, by field name, on both faces."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from chiasm.errors import InvalidRequest
from chiasm.v1 import gateway_pb2
from gateway.api.errors import from_validation
from gateway.api.jobs import Caller, chat_job, raw_jobs
from gateway.api.openai_schema import ChatBody, CompletionBody
from gateway.api.servicer import job_of
from gateway.messages import ChatJob, MediaOptions, Sampling
from gateway.order import context_of
from tests.unit.gateway_face.scripted import chat

CALLER = Caller(request_id="r", tenant=b"tenant")
VOCAB = 400


def job(**fields: Any) -> ChatJob:
    try:
        body = ChatBody.model_validate(chat(**fields))
    except ValidationError as error:
        raise from_validation(error) from error
    return chat_job(body, CALLER, vocab_size=VOCAB)


def refused(**fields: Any) -> str | None:
    with pytest.raises(InvalidRequest) as caught:
        job(**fields)
    assert caught.value.http_status == 400
    return caught.value.param


SETTINGS = {
    "max_tokens": ([1, 16, 10**9], [0, -1, "16", 1.5, True, []]),
    "max_completion_tokens": ([1], [0, -1, "16", 1.5]),
    "min_tokens": ([0, 4], [-1, "0", 1.5]),
    "temperature": ([0, 0.0, 1, 2, 2.0], [-1, 2.1, "1", True, float("nan"), float("inf")]),
    "top_p": ([1, 0.1], [0, -0.1, 1.1, "1"]),
    "top_k": ([-1, 0, 1, 50], [-2, 1.5, "1", 2**31]),
    "min_p": ([0, 1, 0.5], [-0.1, 1.1]),
    "presence_penalty": ([-2, 2], [-2.1, 2.1]),
    "frequency_penalty": ([-2, 2], [-2.1, 2.1]),
    "repetition_penalty": ([0.5, 1, 2.0], [0, -1, 10.1]),
    "seed": ([0, -1, 2**63, 2**64 - 1, -(2**63)], [2**64, -(2**63) - 1, 1.5, "1"]),
    "n": ([1, 4, 128], [0, -1, 129, 1.5, "1"]),
    "stop": (["a", ["a"], ["a", "b", "c", "d"], []], ["", [""], ["a"] * 5, [1], 7, ["a", None]]),
    "stop_token_ids": ([[], [0, VOCAB - 1]], [[VOCAB], [-1], ["1"], 5, [1.5]]),
    "ignore_eos": ([True, False], ["true", 1]),
    "stream": ([True, False], ["true", 1]),
    "logprobs": ([True, False], [5, "true"]),
    "top_logprobs": ([], [1, 21, -1]),  # needs logprobs
    "logit_bias": (
        [{}, {"0": 1, "399": -100}],
        [{"400": 1}, {"-1": 1}, {"abc": 1}, {"1": 101}, {"1": "x"}, {"²": 1}, [1]],
    ),
    "cache_salt": (["x"], ["", 5]),
    "priority": ([-100, 0, 100], [-101, 101, 1.5, "1", True]),
    "return_timings": ([True], ["yes"]),
    "mm_processor_kwargs": (
        [{}, {"min_pixels": 1, "max_pixels": 5, "fps": 2.0, "max_frames": 8}],
        [{"max_pixels": 0}, {"do_resize": False}, {"fps": 0}, 5],
    ),
    "response_format": (
        [
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
            {"type": "json_schema", "json_schema": {"schema": True, "strict": True}},
        ],
        [{}, "text", {"type": "xml"}, {"type": "json_schema"}]
        + [{"type": "json_schema", "json_schema": inner} for inner in ({}, {"schema": "x"}, 5)],
    ),
    "structured_outputs": (
        [
            {"json": {}},
            {"json": "{}"},
            {"regex": "a+"},
            {"choice": ["a"]},
            {"grammar": "start: /a/"},
        ],
        [{}, {"choice": []}, {"json": "{"}, {"json": {}, "regex": "a"}, {"other": 1}, "x"],
    ),
    "guided_json": ([{"type": "object"}, '{"type": "object"}'], [5, "{", []]),
    "guided_regex": (["a+"], ["", 5]),
    "guided_choice": ([["a", "b"]], [[], "a", [1]]),
    "guided_grammar": (["start: /a/"], ["", 5]),
    "tools": (
        [[], [{"type": "function", "function": {"name": "f", "x-own": 1}}]],
        [[{"type": "function"}], "x", [{"type": "function", "function": {"name": "a b"}}]]
        + [[{"function": {"name": "f", "parameters": {"type": "array"}}}]]
        + [[{"function": {"name": "f"}}] * 2],
    ),
    "tool_choice": (["none", "auto"], ["required", {"type": "function"}, "f", 5]),
    "parallel_tool_calls": ([True, False], ["yes"]),
    "include_stop_str_in_output": ([True], [1]),
    "skip_special_tokens": ([False], ["no"]),
    "add_generation_prompt": ([True, False], [0]),
    "continue_final_message": ([False], [True, 1]),
    "functions": ([[]], [[{}]]),
    "modalities": ([["text"]], [["text", "audio"]]),
    "audio": ([], [{"voice": "x"}]),
    "chat_template": ([], ["{{ x }}"]),
    "bad_words": ([[]], [["x"]]),
    "allowed_token_ids": ([], [[1]]),
    "stream_options": ([], [{}, {"include_usage": True}]),  # needs stream
    "user": (["someone"], [5]),
    "metadata": ([{"a": "b"}, 5, None], []),
    "something_else": ([1, None, {}], []),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_null_and_what_is_legal_pass(name: str) -> None:
    assert job(**{name: None}).sampling == Sampling()
    for value in SETTINGS[name][0]:
        job(**{name: value})


@pytest.mark.parametrize("name", [n for n, (_, bad) in SETTINGS.items() if bad])
def test_what_is_not_is_refused_naming_the_field(name: str) -> None:
    for value in SETTINGS[name][1]:
        param = refused(**{name: value})
        assert param is not None, value
        assert param.partition(".")[0].partition("[")[0] == name, value


def test_messages_are_checked_with_their_path() -> None:
    user = {"role": "user", "content": "x"}
    cases = [
        ([], "messages"),
        ({}, "messages"),
        (None, "messages"),
        (["x"], "messages[0]"),
        ([user, {"role": "robot", "content": "x"}], "messages[1].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "system", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        (
            [{"role": "user", "content": [{"type": "text", "text": None}]}],
            "messages[0].content[0].text",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0].image_url.url",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": ""}]}],
            "messages[0].content[0].image_url",
        ),
        (
            [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}],
            "messages[0].tool_calls",
        ),
        (
            [{"role": "assistant", "content": "x", "tool_calls": [{"function": {}}]}],
            "messages[0].tool_calls[0].function.name",
        ),
    ]
    for messages, param in cases:
        assert refused(messages=messages) == param, messages


def test_content_may_be_empty_but_not_null() -> None:
    for content in ("", [], [{"type": "text", "text": ""}]):
        job(messages=[{"role": "user", "content": content}])
    job(messages=[{"role": "assistant", "content": ""}])


def test_both_token_limits() -> None:
    assert job(max_tokens=5).sampling.max_tokens == 5
    assert job(max_completion_tokens=6).sampling.max_tokens == 6
    assert job(max_tokens=7, max_completion_tokens=7).sampling.max_tokens == 7
    assert refused(max_tokens=5, max_completion_tokens=6) == "max_completion_tokens"
    assert refused(max_tokens=5, min_tokens=6) == "min_tokens"
    assert job(max_tokens=10**30).sampling.max_tokens == 2**31 - 1


def test_settings_arrive() -> None:
    found = job(
        temperature=0,
        top_p=0.5,
        top_k=-1,
        seed=-1,
        n=3,
        stop="END",
        stop_token_ids=[3],
        logit_bias={"7": -3},
        logprobs=True,
        top_logprobs=4,
        mm_processor_kwargs={"max_pixels": 50},
        chat_template_kwargs={"mood": "good"},
    )
    assert found.sampling == Sampling(
        temperature=0.0,
        top_p=0.5,
        seed=2**64 - 1,
        n=3,
        stop_token_ids=(3,),
        logit_bias=((7, -3.0),),
        top_logprobs=4,
    )
    assert found.stop == ("END",)
    assert found.media_options == MediaOptions(max_pixels=50)
    assert found.template_options == {"mood": "good"}


def test_a_priority_goes_to_every_service() -> None:
    assert (job().priority, job(priority=5).priority) == (0, 5)
    body = CompletionBody.model_validate({"model": "demo", "prompt": ["x", "y"], "priority": -5})
    jobs = raw_jobs(body, CALLER, vocab_size=VOCAB)
    assert [context_of(each).priority for each in jobs] == [-5, -5]


def test_a_cache_salt_separates_and_keeps_the_tenant() -> None:
    salts = {
        job().tenant_salt,
        job(cache_salt="a").tenant_salt,
        job(cache_salt="b").tenant_salt,
        chat_job(
            ChatBody.model_validate(chat(cache_salt="a")), Caller(request_id="r"), vocab_size=VOCAB
        ).tenant_salt,
    }
    assert len(salts) == 4
    assert job(cache_salt="a").tenant_salt == job(cache_salt="a").tenant_salt


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": True},
        {"suffix": "x"},
        {"best_of": 2},
        {"logprobs": 21},
        {"logprobs": -1},
        {"priority": 101},
    ],
)
def test_completions_refuse_what_they_cannot_do(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        try:
            body = CompletionBody.model_validate({"model": "demo", "prompt": "x", **fields})
        except ValidationError as error:
            raise from_validation(error) from error
        raw_jobs(body, CALLER, vocab_size=VOCAB)
    assert caught.value.param == next(iter(fields))


def request(**fields: Any) -> gateway_pb2.ChatRequest:
    message = gateway_pb2.ChatMessage(role="user", parts=[gateway_pb2.ContentPart(text="hi")])
    return gateway_pb2.ChatRequest(**{"model": "demo", "messages": [message], **fields})


def test_the_other_face_gives_the_same_job() -> None:
    fields = {
        "max_tokens": 5,
        "temperature": 0.5,
        "top_k": 3,
        "seed": -1,
        "stop": ["a", "b"],
        "stop_token_ids": [1],
        "ignore_eos": True,
        "n": 2,
        "min_tokens": 1,
        "priority": -7,
    }
    assert job_of(request(**fields), CALLER, vocab_size=VOCAB) == job(**fields)
    assert job_of(request(), CALLER, vocab_size=VOCAB) == job()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": ""}, "model"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"n": 0}, "n"),
        ({"priority": 101}, "priority"),
        ({"priority": -101}, "priority"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids[0]"),
        ({"messages": [gateway_pb2.ChatMessage(role="robot")]}, "messages[0].role"),
        ({"messages": [gateway_pb2.ChatMessage(role="user")]}, "messages[0].parts"),
        (
            {"messages": [gateway_pb2.ChatMessage(role="user", parts=[gateway_pb2.ContentPart()])]},
            "messages[0].parts[0]",
        ),
    ],
)
def test_the_other_face_refuses_the_same(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        job_of(request(**fields), CALLER, vocab_size=VOCAB)
    assert caught.value.param == param


WRONG = {
    "messages": chat(messages=[1] * 2000),
    "parts": chat([{}] * 2000),
    "calls": chat(messages=[{"role": "assistant", "tool_calls": [1] * 2000}]),
    "biases": chat(logit_bias={str(index): "x" for index in range(2000)}),
}


@pytest.mark.parametrize("body", WRONG.values(), ids=WRONG)
def test_what_is_wrong_thousands_of_times_is_described_once(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatBody.model_validate(body)
    assert caught.value.error_count() == 1


def test_what_is_wrong_is_said_without_the_validators_words() -> None:
    with pytest.raises(InvalidRequest) as caught:
        job(logit_bias={str(index): 1 for index in range(1025)})
    assert caught.value.message == "logit_bias: at most 1024 biases, not 1025"
