"""Bodies to what guides an answer: tools, response_format, structured_outputs and their kin."""

from __future__ import annotations

from typing import Any

import orjson

from chiasm.errors import InvalidRequest
from gateway.api.guide_schema import NamedTool, ResponseFormat, StructuredOutputs, ToolBody
from gateway.api.openai_schema import ChatBody, SamplingBody
from gateway.messages import Guide, GuideKind, Tool, Toolbox, ToolChoice


def toolbox_of(body: ChatBody) -> Toolbox | None:
    """The tools of a chat request; None when there are none.

    Raises:
        InvalidRequest: A choice without its tool, two tools of one name, parameters of no object.
    """
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        return None
    tools = tuple(tool_of(tool, f"tools[{index}]") for index, tool in enumerate(body.tools))
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise InvalidRequest(
                f"two tools are called {name}", param=f"tools[{index}].function.name"
            )
    named = choice.function.name if isinstance(choice, NamedTool) else None
    if named is not None and named not in names:
        raise InvalidRequest(
            f"there is no tool {named!r} among tools", param="tool_choice.function.name"
        )
    return Toolbox(
        tools=tools,
        choice=ToolChoice(choice) if isinstance(choice, str) else ToolChoice.AUTO,
        named=named,
        parallel=body.parallel_tool_calls is not False,
    )


def guide_of(body: SamplingBody) -> Guide | None:
    """The form an answer must have; None when it is free.

    Raises:
        InvalidRequest: Two forms, or one that says nothing.
    """
    found = [
        guide
        for guide in (
            _of_format(body.response_format),
            _of_structured(body.structured_outputs),
            _one("guided_json", GuideKind.JSON_SCHEMA, _schema(body.guided_json, "guided_json")),
            _one("guided_regex", GuideKind.REGEX, body.guided_regex),
            _one("guided_choice", GuideKind.CHOICE, body.guided_choice),
            _one("guided_grammar", GuideKind.LARK, body.guided_grammar),
        )
        if guide is not None
    ]
    if len(found) > 1:
        raise InvalidRequest(
            f"{found[0].param} and {found[1].param} cannot both be obeyed", param=found[1].param
        )
    return found[0] if found else None


def tool_of(body: ToolBody, param: str) -> Tool:
    """One tool; raises InvalidRequest for parameters that are none of an object."""
    function = body.function
    parameters = function.parameters or {}
    if parameters.get("type", "object") != "object":
        raise InvalidRequest(
            "a function's parameters are a schema of an object",
            param=f"{param}.function.parameters.type",
        )
    return Tool(
        name=function.name,
        body={"type": "function", "function": function.model_dump(exclude_unset=True)},
        parameters=parameters,
        strict=bool(function.strict),
    )


def _of_format(form: ResponseFormat | None) -> Guide | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Guide(GuideKind.JSON_SCHEMA, {"type": "object"}, "response_format")
    param = "response_format.json_schema"
    if form.json_schema is None:
        raise InvalidRequest("the type json_schema needs json_schema", param=param)
    if form.json_schema.schema_ is None:
        raise InvalidRequest("a schema is needed", param=f"{param}.schema")
    return Guide(GuideKind.JSON_SCHEMA, form.json_schema.schema_, f"{param}.schema")


def _of_structured(form: StructuredOutputs | None) -> Guide | None:
    if form is None:
        return None
    where = "structured_outputs"
    found = [
        guide
        for guide in (
            _one(f"{where}.json", GuideKind.JSON_SCHEMA, _schema(form.json_, f"{where}.json")),
            _one(
                f"{where}.json_object",
                GuideKind.JSON_SCHEMA,
                {"type": "object"} if form.json_object else None,
            ),
            _one(f"{where}.regex", GuideKind.REGEX, form.regex),
            _one(f"{where}.choice", GuideKind.CHOICE, form.choice),
            _one(f"{where}.grammar", GuideKind.LARK, form.grammar),
        )
        if guide is not None
    ]
    if len(found) != 1:
        raise InvalidRequest("exactly one of json, regex, choice, grammar is needed", param=where)
    return found[0]


def _schema(value: Any, param: str) -> Any:
    """A schema may also come as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"it is not JSON: {error}", param=param) from error


def _one(param: str, kind: GuideKind, value: Any) -> Guide | None:
    if value is None:
        return None
    return Guide(kind, tuple(value) if kind is GuideKind.CHOICE else value, param)
