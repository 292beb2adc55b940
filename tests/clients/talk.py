"""`python talk.py URL`: LiteLLM and LangChain's ChatOpenAI, unmodified, against a running gateway.

Runs in an environment of its own (requirements.txt) and needs nothing of this repository.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

QUESTION = "What is in the picture?"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "count",
        "description": "Counts shapes.",
        "parameters": {
            "type": "object",
            "properties": {"shape": {"enum": ["circle", "square"]}},
            "required": ["shape"],
            "additionalProperties": False,
        },
    },
}


class Shape(BaseModel):
    """A shape."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["circle", "square"]
    filled: bool


def messages(picture: str) -> list[dict[str, Any]]:
    parts = [
        {"type": "image_url", "image_url": {"url": picture}},
        {"type": "text", "text": QUESTION},
    ]
    return [{"role": "user", "content": parts}]


def try_litellm(url: str, picture: str) -> None:
    import litellm

    litellm.telemetry = False
    common: dict[str, Any] = {
        "model": "openai/demo",
        "api_base": f"{url}/v1",
        "api_key": "none",
        "messages": messages(picture),
        "max_tokens": 300,
        "temperature": 0,
    }
    whole = litellm.completion(**common)
    text = whole.choices[0].message.content
    assert "red" in text and "circle" in text, text
    assert whole.usage.completion_tokens > 0
    stream = litellm.completion(**common, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
    formed = litellm.completion(**common, response_format=Shape, seed=1)
    Shape.model_validate_json(formed.choices[0].message.content)
    called = litellm.completion(**common, tools=[TOOL], tool_choice="required", seed=1)
    message = called.choices[0].message
    call = message.tool_calls[0]
    assert json.loads(call.function.arguments)["shape"] in ("circle", "square")
    turns = [*common["messages"], message.model_dump(exclude_none=True)]
    for one in message.tool_calls:
        turns.append({"role": "tool", "tool_call_id": one.id, "content": "1"})
    after = litellm.completion(**{**common, "messages": turns, "max_tokens": 8}, tools=[TOOL])
    assert after.choices[0].finish_reason in ("stop", "length", "tool_calls")


def try_langchain(url: str, picture: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(
        model="demo", base_url=f"{url}/v1", api_key="none", max_tokens=300, temperature=0, seed=1
    )
    asked = HumanMessage(content=messages(picture)[0]["content"])
    whole = chat.invoke([asked])
    assert "red" in whole.content and "circle" in whole.content, whole.content
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in chat.stream([asked])) == whole.content
    shape = chat.with_structured_output(Shape).invoke([asked])
    assert isinstance(shape, Shape)
    shape = chat.with_structured_output(Shape, method="function_calling").invoke([asked])
    assert isinstance(shape, Shape)
    forced = chat.bind_tools([TOOL], tool_choice="count", parallel_tool_calls=False)
    called = forced.invoke([asked])
    (call,) = called.tool_calls
    assert call["name"] == "count" and call["args"]["shape"] in ("circle", "square")
    after = (
        chat.bind_tools([TOOL])
        .bind(max_tokens=8)
        .invoke([asked, called, ToolMessage(content="1", tool_call_id=call["id"])])
    )
    assert isinstance(after.content, str)


def main() -> None:
    """Both; raises where one is not served as it should be."""
    url, picture_file = sys.argv[1:]
    data = base64.b64encode(Path(picture_file).read_bytes()).decode()
    picture = f"data:image/png;base64,{data}"
    for name, attempt in (("litellm", try_litellm), ("langchain", try_langchain)):
        attempt(url, picture)
        print(f"{name}: ok", flush=True)


if __name__ == "__main__":
    main()
