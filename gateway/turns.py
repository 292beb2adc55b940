"""Messages as chat templates expect them, every string of the client's guarded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from chiasm.plan import Modality
from gateway.messages import ChatJob, Message, TextPart, Tool, ToolCall, ToolChoice
from gateway.specials import SpecialTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnForm:
    """How a conversation is to be rendered, beside its messages."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template."""
    tools: tuple[Tool, ...] = ()
    add_generation_prompt: bool = True
    continue_final: bool = False
    """Whether the last message is left open."""

    @classmethod
    def of(cls, job: ChatJob) -> TurnForm:
        """A job's. Tools that may not be called are not shown."""
        box = job.toolbox
        shown = box.tools if box is not None and box.choice is not ToolChoice.NONE else ()
        return cls(
            options=job.template_options,
            tools=shown,
            add_generation_prompt=job.add_generation_prompt,
            continue_final=job.continue_final,
        )


def turn_of(
    message: Message,
    specials: SpecialTokens,
    *,
    takes_text: bool,
    in_text: Callable[[Modality], str] | None = None,
) -> dict[str, Any]:
    """One message.

    Args:
        message: The message.
        specials: Guards its strings.
        takes_text: Whether content may be a plain string.
        in_text: How a medium stands in one, for templates that take nothing else.
    """
    guard = specials.guard
    content = _content(message, specials, takes_text=takes_text, in_text=in_text)
    turn: dict[str, Any] = {"role": message.role.value, "content": content}
    if message.tool_calls:
        turn["tool_calls"] = [_call(call, specials) for call in message.tool_calls]
    if message.name is not None:
        turn["name"] = guard(message.name)
    if message.tool_call_id is not None:
        turn["tool_call_id"] = guard(message.tool_call_id)
    if message.reasoning is not None:
        turn["reasoning_content"] = guard(message.reasoning)
    return turn


def left_open(turn: dict[str, Any], mark: str) -> dict[str, Any]:
    """The turn with a mark where its text ends."""
    content = turn["content"]
    if isinstance(content, str):
        return {**turn, "content": content + mark}
    return {**turn, "content": [*content, {"type": "text", "text": mark}]}


def _content(
    message: Message,
    specials: SpecialTokens,
    *,
    takes_text: bool,
    in_text: Callable[[Modality], str] | None,
) -> str | list[dict[str, str]]:
    texts = [part.text for part in message.parts if isinstance(part, TextPart)]
    if len(texts) == len(message.parts) and takes_text:
        return specials.guard("".join(texts))
    if in_text is not None:
        return "".join(
            specials.guard(part.text) if isinstance(part, TextPart) else in_text(part.modality)
            for part in message.parts
        )
    return [
        {"type": "text", "text": specials.guard(part.text)}
        if isinstance(part, TextPart)
        else {"type": part.modality.value}
        for part in message.parts
    ]


def _call(call: ToolCall, specials: SpecialTokens) -> dict[str, Any]:
    arguments: Any = call.arguments
    try:  # nothing at all is how some clients write a call without arguments
        parsed = orjson.loads(call.arguments if call.arguments.strip() else "{}")
    except orjson.JSONDecodeError:
        pass  # what a model once wrote may not be JSON; it is shown as it was
    else:
        arguments = parsed if isinstance(parsed, dict) else arguments
    guard = specials.guard_value
    function = {"name": guard(call.name), "arguments": guard(arguments)}
    return {"type": "function", "id": guard(call.id), "function": function}
