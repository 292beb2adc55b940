"""The description of the REST face: /openapi.json, and /docs as one self-contained page.

Handlers read bodies themselves (off the event loop when large), so request schemas are added here.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.api.openai_schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

_REF = "#/components/schemas/{model}"
_BODIES: tuple[type[BaseModel], ...] = (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody)
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


def takes(model: type[BaseModel], *, streams: bool = False) -> dict[str, Any]:
    """The `openapi_extra` of a route whose JSON body is `model`, and which may answer in events."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    extra: dict[str, Any] = {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}
    }
    if streams:
        extra["responses"] = {"200": {"content": {"text/event-stream": {}}}}
    return extra


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of `app`: bodies are described, and every error has our shape."""
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    _, definitions = models_json_schema(
        [(model, "validation") for model in _BODIES], ref_template=_REF
    )
    document["components"] = {
        "schemas": {**definitions["$defs"], "Error": _ERROR},
        "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
    }
    document["security"] = [{}, {"key": []}]  # keys are asked for where --api-key-file is set
    for methods in document["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
            operation["responses"] |= {"4XX": _error_response(), "5XX": _error_response()}
    return document


@cache
def docs_page() -> bytes:
    """The page behind /docs: no script, style or font from elsewhere."""
    return (files("gateway.api") / "docs.html").read_bytes()


def _error_response() -> dict[str, Any]:
    schema = {"$ref": _REF.format(model="Error")}
    return {
        "description": "An error in OpenAI's shape",
        "content": {"application/json": {"schema": schema}},
    }
