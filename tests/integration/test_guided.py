"""Answers of a given form, and tools, through the unmodified OpenAI SDK and the running system."""

from __future__ import annotations

import json
from typing import Any, Literal

import grpc
import jsonschema
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from chiasm.v1 import gateway_pb2, gateway_pb2_grpc
from tests.integration.media import circle, image_part, text_part
from tests.integration.stack import Service

MODEL = "demo"
ASK: list[dict[str, Any]] = [{"role": "user", "content": "How many circles are there?"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "count",
        "description": "Counts shapes.",
        "parameters": {
            "type": "object",
            "properties": {
                "shape": {"$ref": "#/$defs/shape"},
                "most": {"type": "integer", "minimum": 0, "maximum": 9},
            },
            "required": ["shape"],
            "additionalProperties": False,
            "$defs": {"shape": {"enum": ["circle", "square"]}},
        },
    },
}
NOTHING: dict[str, Any] = {"type": "object", "additionalProperties": False}
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "stop", "parameters": NOTHING}}


class Shape(BaseModel, extra="forbid"):
    kind: Literal["circle", "square"]
    count: int
    filled: bool


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


def ask(client: OpenAI, **options: Any) -> Any:
    chosen = {"messages": ASK, "max_tokens": 600, "seed": 1, **options}
    return client.chat.completions.create(model=MODEL, **chosen).choices[0]


def test_parse_gives_a_pydantic_model(client: OpenAI) -> None:
    picture = [image_part(circle("red")), text_part("What is in the picture?")]
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": picture}],
        response_format=Shape,
        max_tokens=600,
        seed=3,
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Shape)


def test_json_schema_streamed_equals_whole(client: OpenAI) -> None:
    form = schema_format(Shape.model_json_schema())
    whole = ask(client, response_format=form).message.content
    Shape.model_validate_json(whole)
    stream = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=600, seed=1, response_format=form, stream=True
    )
    assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == whole


def test_json_object_regex_choice_and_grammar(client: OpenAI) -> None:
    found = ask(client, response_format={"type": "json_object"}, max_tokens=2000, temperature=0.2)
    if found.finish_reason == "stop":
        assert isinstance(json.loads(found.message.content), dict)
    assert found.message.content.startswith("{")

    def guided(**form: Any) -> str:
        body = {"structured_outputs": form}
        return str(ask(client, extra_body=body).message.content)

    assert guided(choice=["a/b", 'c"d']) in ("a/b", 'c"d')
    assert guided(regex=r"\d{3}-x/[yz]")[3:6] == "-x/"
    assert guided(grammar='start: "yes" | "no" /!{2}/') in ("yes", "no!!")
    jsonschema.validate(json.loads(guided(json={"enum": [1, "b"]})), {"enum": [1, "b"]})


def test_a_cut_answer_says_so(client: OpenAI) -> None:
    found = ask(client, response_format=schema_format(Shape.model_json_schema()), max_tokens=4)
    assert found.finish_reason == "length"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": "string"}},
        {"type": "string", "pattern": "(("},
        {"$ref": "#/nowhere"},
    ],
)
def test_a_bad_schema_is_a_400_that_names_it(client: OpenAI, schema: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, response_format=schema_format(schema))
    assert refused.value.param == "response_format.json_schema.schema"
    assert ask(client, max_tokens=2).message.content is not None


def call_of(choice: Any, schema: dict[str, Any] = TOOL["function"]["parameters"]) -> Any:
    (call,) = choice.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), schema)
    return call


COUNT = {"type": "function", "function": {"name": "count"}}


@pytest.mark.parametrize("choice", ["required", COUNT])
def test_a_tool_that_must_be_called_is_called_rightly(client: OpenAI, choice: Any) -> None:
    found = ask(client, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    assert found.finish_reason == "tool_calls"
    assert found.message.content is None
    assert call_of(found).function.name == "count"


def test_calls_stream_and_go_round(client: OpenAI) -> None:
    """The streamed call equals the whole one; with the tool's answer the chat goes on."""
    options: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "seed": 5}
    options["parallel_tool_calls"] = False
    call = call_of(ask(client, **options))
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, max_tokens=600, **options
    ) as stream:
        kinds = {event.type for event in stream}
        last = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds
    assert last.message.tool_calls[0].function.arguments == call.function.arguments
    assert last.finish_reason == "tool_calls"
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "4"},
    ]
    after = ask(client, messages=messages, tools=[TOOL], tool_choice="none", max_tokens=8)
    assert after.message.tool_calls is None and after.finish_reason in ("stop", "length")


def test_several_calls_of_several_tools(client: OpenAI) -> None:
    seen = []
    for seed in range(4):
        found = ask(client, tools=[TOOL, OTHER], tool_choice="required", seed=seed)
        if found.finish_reason == "tool_calls":
            seen += [call.function.name for call in found.message.tool_calls]
            for call in found.message.tool_calls:
                assert isinstance(json.loads(call.function.arguments), dict)
    assert len(seen) > 4 and set(seen) <= {"count", "stop"}


def test_free_answers_with_tools_are_text_or_calls(client: OpenAI) -> None:
    found = ask(client, tools=[TOOL], max_tokens=32, temperature=0)
    assert found.message.content or found.message.tool_calls


async def test_async_and_parallel(base_url: str) -> None:
    async with AsyncOpenAI(base_url=f"{base_url}/v1", api_key="x", max_retries=0) as client:
        form = schema_format(Shape.model_json_schema())
        answer = await client.chat.completions.create(
            model=MODEL, messages=ASK, response_format=form, n=3, max_tokens=600, seed=2
        )
        for choice in answer.choices:
            Shape.model_validate_json(choice.message.content)
        stream = await client.chat.completions.create(
            model=MODEL, messages=ASK, tools=[TOOL], tool_choice="required", stream=True, seed=1
        )
        names = [
            call.function.name
            async for chunk in stream
            for choice in chunk.choices
            for call in choice.delta.tool_calls or ()
            if call.function.name
        ]
    assert names and set(names) == {"count"}


async def test_tools_and_forms_over_grpc(gateway: Service) -> None:
    part = gateway_pb2.ContentPart(text="How many circles are there?")
    common = {"model": MODEL, "max_tokens": 600, "seed": 1}
    asked = gateway_pb2.ChatMessage(role="user", parts=[part])
    async with grpc.aio.insecure_channel(gateway.grpc) as channel:
        chat = gateway_pb2_grpc.GatewayStub(channel).Chat
        form = json.dumps(schema_format(Shape.model_json_schema()))
        request = gateway_pb2.ChatRequest(messages=[asked], response_format=form, **common)
        text = "".join([answer.delta async for answer in chat(request)])
        Shape.model_validate_json(text)
        tools = {"tools": json.dumps([TOOL]), "tool_choice": "required"}
        request = gateway_pb2.ChatRequest(
            messages=[asked], parallel_tool_calls=False, **tools, **common
        )
        answers = [answer async for answer in chat(request)]
        calls = [call for answer in answers for call in answer.tool_calls]
        assert [call.name for call in calls if call.name] == ["count"]
        arguments = "".join(call.arguments for call in calls)
        jsonschema.validate(json.loads(arguments), TOOL["function"]["parameters"])
        assert "tool_calls" in [answer.finish_reason for answer in answers]
        made = gateway_pb2.ToolCall(id=calls[0].id, name="count", arguments=arguments)
        turns = [
            asked,
            gateway_pb2.ChatMessage(role="assistant", tool_calls=[made]),
            gateway_pb2.ChatMessage(role="tool", tool_call_id=made.id, parts=[part]),
        ]
        request = gateway_pb2.ChatRequest(messages=turns, **{**common, "max_tokens": 4})
        assert [answer async for answer in chat(request)][-1].usage.completion_tokens > 0
        bad = gateway_pb2.ChatRequest(messages=[asked], tools="{", **common)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await chat(bad).read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
