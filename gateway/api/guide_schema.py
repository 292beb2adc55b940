"""Request bodies: tools, and the form an answer must have. See `openai_schema`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

_OPEN = ConfigDict(extra="ignore", frozen=True)
Text = Annotated[str, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Name = Annotated[str, Field(strict=True, pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
Schema = dict[str, Any]


class FunctionBody(BaseModel):
    """A function that may be called. The chat template sees it as it is."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: Name
    description: Text | None = None
    parameters: Schema | None = None
    strict: Flag | None = None


class ToolBody(BaseModel):
    """One tool."""

    model_config = _OPEN

    type: Literal["function"] = "function"
    function: FunctionBody


class _NamedFunction(BaseModel):
    model_config = _OPEN

    name: Name


class NamedTool(BaseModel):
    """The one tool that must be called."""

    model_config = _OPEN

    type: Literal["function"] = "function"
    function: _NamedFunction


def _choice_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "@string"
    return "@object" if isinstance(value, dict | NamedTool) else None


ToolChoiceBody = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("@string")]
    | Annotated[NamedTool, Tag("@object")],
    Discriminator(
        _choice_kind,
        custom_error_type="tool_choice_type",
        custom_error_message="tool_choice must be none, auto, required or a function's name",
    ),
]


class JsonSchemaBody(BaseModel):
    """A named schema. It is always obeyed, strict or not."""

    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)

    name: Text | None = None
    description: Text | None = None
    schema_: Annotated[Schema | bool | None, Field(alias="schema")] = None
    strict: Flag | None = None


class ResponseFormat(BaseModel):
    """The form of an answer: any text, any JSON object, or JSON that fits a schema."""

    model_config = _OPEN

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaBody | None = None


class StructuredOutputs(BaseModel):
    """The form of an answer, as vLLM's servers take it: exactly one of these."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    json_: Annotated[Schema | bool | str | None, Field(alias="json")] = None
    json_object: Flag | None = None
    regex: Annotated[str, Field(strict=True, min_length=1)] | None = None
    choice: Annotated[list[Text], Field(min_length=1, max_length=10_000)] | None = None
    grammar: Annotated[str, Field(strict=True, min_length=1)] | None = None
