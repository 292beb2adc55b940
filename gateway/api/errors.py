"""Every error in OpenAI's shape: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import orjson
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from chiasm.errors import (
    ChiasmError,
    Internal,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from gateway.api.openai_schema import TAG


def error_body(error: ChiasmError) -> bytes:
    """The envelope as JSON."""
    return orjson.dumps(
        {
            "error": {
                "message": error.message,
                "type": error.kind,
                "param": error.param,
                "code": error.code,
            }
        }
    )


def error_headers(error: ChiasmError) -> dict[str, str]:
    """Retry-After where trying again makes sense, WWW-Authenticate where a key is missing."""
    headers = {}
    if error.retry_after_s or isinstance(error, ResourceExhausted | Unavailable):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s or 1)))
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    return headers


def error_response(error: ChiasmError, headers: Mapping[str, str] | None = None) -> Response:
    """A plain JSON answer for an error before the status line."""
    return Response(
        error_body(error),
        status_code=error.http_status,
        media_type="application/json",
        headers={**error_headers(error), **(headers or {})},
    )


def from_validation(error: ValidationError) -> InvalidRequest:
    """The first thing wrong with a body, named by its path."""
    first = error.errors(include_url=False, include_input=False)[0]
    param = path(first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    return InvalidRequest(f"{param}: {message}" if param else message, param=param)


def path(location: Sequence[int | str]) -> str | None:
    """``messages[0].content[1].text`` from pydantic's location; union tags are left out."""
    out = ""
    for step in location:
        if isinstance(step, int):
            out += f"[{step}]"
        elif not step.startswith(TAG):
            out += f".{step}" if out else step
    return out or None


async def on_http_error(request: Request, error: Exception) -> Response:
    """Exception handler for the framework's 404 and 405."""
    assert isinstance(error, HTTPException)
    route = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return error_response(NotFound(f"no such route: {route}"))
    if error.status_code == 405:
        return error_response(MethodNotAllowed(f"not allowed: {route}"), error.headers)
    return error_response(Internal("internal error"))
