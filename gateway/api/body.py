"""Request bodies: bounded reading, one JSON parse, one validation; off the loop when large."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from chiasm.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    TooLarge,
    UnsupportedMediaType,
)
from gateway.api.budget import ByteLease
from gateway.api.errors import from_validation
from gateway.api.inline import Lifted, lift, media_urls
from gateway.api.openai_schema import ChatBody
from gateway.api.protocol import BoundedProtocol

OFF_LOOP_BYTES = 4 << 20  # parsing holds the interpreter: a thread only helps with what follows
MAX_DEPTH = 64  # of nested JSON: templates and validators recurse
SILENCE_S = 30.0  # how long a client may send nothing in the middle of a body

Model = TypeVar("Model", bound=BaseModel)


async def read_body(request: Request, model: type[Model], *, max_bytes: int) -> Model:
    """The request's JSON body as `model`.

    Raises:
        UnsupportedMediaType: It is not declared as JSON, or it is compressed.
        TooLarge: It has more than `max_bytes`.
        ResourceExhausted: It does not fit beside the bodies of other requests.
        DeadlineExceeded: The client stopped sending.
        InvalidRequest: It is not JSON, nested too deeply, or not what `model` asks for.
    """
    _check_headers(request)
    raw = await _read(request, max_bytes)
    if len(raw) > OFF_LOOP_BYTES:
        return await asyncio.to_thread(parse, raw, model)
    return parse(raw, model)


async def read_chat(request: Request, *, max_bytes: int) -> tuple[ChatBody, Lifted]:
    """The body of a chat request, and what its media URLs stand for. Raises as `read_body`."""
    _check_headers(request)
    raw = await _read(request, max_bytes)
    if len(raw) > OFF_LOOP_BYTES:
        return await asyncio.to_thread(parse_chat, raw)
    return parse_chat(raw)


def parse_chat(raw: bytes | bytearray) -> tuple[ChatBody, Lifted]:
    """JSON text as a chat body with long data URIs apart; raises InvalidRequest."""
    short, lifted = lift(raw)
    if lifted:
        try:
            value = _object(short)
            if set(media_urls(value)) >= lifted.keys():
                return _validated(value, ChatBody), lifted
        except InvalidRequest:
            pass  # what is wrong is said of the text as it came
    return parse(raw, ChatBody), {}


def parse(raw: bytes | bytearray, model: type[Model]) -> Model:
    """JSON text as `model`; raises InvalidRequest."""
    return _validated(_object(raw), model)


def _object(raw: bytes | bytearray) -> dict[str, Any]:
    if not raw or raw.isspace():
        raise InvalidRequest("the body is empty; a JSON object is needed")
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    if _may_be_deep(raw) and _depth_exceeds(value, MAX_DEPTH):
        raise InvalidRequest(f"the body is nested more than {MAX_DEPTH} levels deep")
    return value


def _validated(value: dict[str, Any], model: type[Model]) -> Model:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise from_validation(error) from error


def _check_headers(request: Request) -> None:
    declared = request.headers.get("content-type", "application/json")
    kind = declared.partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise UnsupportedMediaType("content-type must be application/json")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise UnsupportedMediaType("compressed bodies are not taken")


async def _read(request: Request, max_bytes: int) -> bytearray:
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    lease = request.state.lease
    assert isinstance(lease, ByteLease), "the front layer gives every request one"
    connection = getattr(request.state, "connection", None)
    now = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(SILENCE_S) as silence:

            def heard() -> None:
                silence.reschedule(now() + SILENCE_S)

            if length.isdecimal() and isinstance(connection, BoundedProtocol):
                whole = await connection.fill(
                    request.scope, int(length), reserve=lease.add, heard=heard
                )
                if whole is not None:
                    return whole
            raw = bytearray()
            async for chunk in request.stream():
                lease.add(len(chunk))
                raw += chunk
                if len(raw) > max_bytes:
                    raise _too_large(max_bytes)
                heard()
        return raw
    except (ClientDisconnect, ConnectionError) as error:
        raise Cancelled("the client went away") from error
    except TimeoutError as error:
        raise DeadlineExceeded(f"no more of the body came for {SILENCE_S:.0f} s") from error


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"the body has more than {max_bytes} bytes")


def _may_be_deep(raw: bytes | bytearray) -> bool:
    """Whether there are brackets enough. Looks for few of them: a picture has none, and is long."""
    count = 0
    for bracket in (b"[", b"{"):
        at = raw.find(bracket)
        while at >= 0 and count <= MAX_DEPTH:
            count += 1
            at = raw.find(bracket, at + 1)
    return count > MAX_DEPTH


def _depth_exceeds(value: Any, limit: int) -> bool:
    """Level by level, so that depth costs no recursion."""
    level: list[Any] = [value]
    for _ in range(limit):
        below: list[Any] = []
        for node in level:
            children = node.values() if isinstance(node, dict) else node
            below.extend(child for child in children if isinstance(child, dict | list))
        if not below:
            return False
        level = below
    return True
