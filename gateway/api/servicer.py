"""The gRPC face, `chiasm.v1.Gateway`: the same pipeline, limits, keys and errors as REST.

A request's settings go through the REST face's model, so that both faces refuse the same things in
the same words.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import asdict, replace
from typing import Any

import grpc
import orjson
from pydantic import ValidationError

from chiasm.errors import Cancelled, ChiasmError, Internal, InvalidRequest, Unauthenticated
from chiasm.plan import Modality
from chiasm.v1 import gateway_pb2, gateway_pb2_grpc
from gateway.api.drain import Gate
from gateway.api.errors import from_validation
from gateway.api.face import Face
from gateway.api.front import request_id_of
from gateway.api.jobs import Caller, chat_job
from gateway.api.observe import observed
from gateway.api.openai_schema import ChatBody
from gateway.messages import (
    ChatJob,
    ChoiceDone,
    Delta,
    Event,
    MediaPart,
    Message,
    Role,
    TextPart,
    ToolCall,
)

logger = logging.getLogger(__name__)

Handler = Any  # grpc.RpcMethodHandler, which takes no type arguments at run time
Context = grpc.aio.ServicerContext[Any, Any]
_OPEN_SERVICE = "/grpc.health.v1.Health/"
_JSON_FIELDS = frozenset(
    (
        *("response_format", "tools", "tool_choice", "structured_outputs"),
        *("chat_template_kwargs", "mm_processor_kwargs"),
    )
)
_ROLES = {"developer": Role.SYSTEM, **{role.value: role for role in Role}}


class GatewayServicer(gateway_pb2_grpc.GatewayServicer):
    """Translates; the pipeline decides."""

    def __init__(self, face: Face, gate: Gate) -> None:
        self._face = face
        self._gate = gate

    async def Chat(
        self, request: gateway_pb2.ChatRequest, context: Context
    ) -> AsyncIterator[gateway_pb2.ChatResponse]:
        """One answer, delta by delta; the last message carries usage and, if asked, timings."""
        metadata = context.invocation_metadata() or ()
        request_id = request_id_of(_first(metadata, "x-request-id"))
        await context.send_initial_metadata((("x-request-id", request_id),))
        tenant = self._face.keys.tenant(_values(metadata, "authorization"))
        with self._counted(request_id), self._gate.enter(), self._face.tenants.enter(tenant):
            caller = Caller(
                request_id=f"{request_id}-{secrets.token_hex(4)}",
                tenant=tenant,
                traceparent=_first(metadata, "traceparent"),
                tracestate=_first(metadata, "tracestate"),
            )
            job = job_of(request, caller, vocab_size=self._face.vocab_size)
            job = replace(job, timeout_s=context.time_remaining())
            reply_id = f"chatcmpl-{job.request_id}"
            events = observed(job, self._face.pipeline.run(job), self._face.metrics)
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, Delta) and not _says(event):
                        continue
                    yield _response(reply_id, event, timings=request.return_timings)

    async def ListModels(
        self, request: gateway_pb2.ListModelsRequest, context: Context
    ) -> gateway_pb2.ListModelsResponse:
        """Exactly the names that requests may use."""
        return gateway_pb2.ListModelsResponse(
            models=[
                gateway_pb2.Model(
                    id=model.id,
                    created=model.created,
                    owned_by="chiasm",
                    max_model_len=model.max_model_len,
                )
                for model in self._face.pipeline.models()
            ]
        )

    @contextmanager
    def _counted(self, request_id: str) -> Iterator[None]:
        """One line and one count a request, by the table's HTTP status as on the REST face."""
        outcome = Internal.http_status
        began = time.perf_counter()
        try:
            yield
            outcome = 200
        except ChiasmError as error:
            outcome = error.http_status
            raise
        except (asyncio.CancelledError, GeneratorExit):
            outcome = Cancelled.http_status
            raise
        finally:
            self._face.metrics.requests.labels(str(outcome)).inc()
            taken_ms = (time.perf_counter() - began) * 1000
            logger.info("%s grpc Chat %s %.0f ms", request_id, outcome, taken_ms)


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Every method but health asks for a key, reflection included."""

    def __init__(self, face: Face) -> None:
        self._face = face

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Lets a call through, or puts a handler that raises Unauthenticated in its place."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_OPEN_SERVICE):
            return handler
        keys = _values(handler_call_details.invocation_metadata, "authorization")
        try:
            self._face.keys.tenant(keys)
        except Unauthenticated as error:
            return _refusing(handler, error)
        return handler


def job_of(request: gateway_pb2.ChatRequest, caller: Caller, *, vocab_size: int) -> ChatJob:
    """The job of a gRPC request.

    Raises:
        InvalidRequest: Naming the field that cannot be obeyed.
    """
    settings = {
        field.name: _setting(field.name, value)
        for field, value in request.ListFields()
        if field.name != "messages"
    }
    if not request.messages:
        raise InvalidRequest("messages: at least one is needed", param="messages")
    stand_in = [{"role": "user", "content": ""}]  # the real ones may carry files
    try:
        body = ChatBody.model_validate({**settings, "messages": stand_in})
    except ValidationError as error:
        raise from_validation(error) from error
    job = chat_job(body, caller, vocab_size=vocab_size)
    messages = tuple(_message(m, f"messages[{i}]") for i, m in enumerate(request.messages))
    return replace(job, messages=messages)


def _message(message: gateway_pb2.ChatMessage, param: str) -> Message:
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidRequest(f"the role must be one of {', '.join(_ROLES)}", param=f"{param}.role")
    if not message.parts and not message.tool_calls:
        raise InvalidRequest(f"a {role} message needs parts", param=f"{param}.parts")
    if message.tool_calls and role is not Role.ASSISTANT:
        raise InvalidRequest(f"a {role} message has no tool_calls", param=f"{param}.tool_calls")
    return Message(
        role,
        tuple(_part(part, f"{param}.parts[{i}]") for i, part in enumerate(message.parts)),
        tuple(ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls),
        tool_call_id=message.tool_call_id or None,
        reasoning=message.reasoning or None,
    )


def _setting(name: str, value: Any) -> Any:
    """A field as the REST face's model takes it."""
    if name in _JSON_FIELDS and (name != "tool_choice" or value.lstrip().startswith("{")):
        try:
            return orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise InvalidRequest(f"{name} is not JSON: {error}", param=name) from error
    return value if isinstance(value, str | int | float) else list(value)


def _says(delta: Delta) -> bool:
    return bool(delta.text or delta.reasoning or delta.calls)


def _part(part: gateway_pb2.ContentPart, param: str) -> TextPart | MediaPart:
    match part.WhichOneof("kind"):
        case "text":
            return TextPart(part.text)
        case "image_url":
            return MediaPart(Modality.IMAGE, url=part.image_url, param=param)
        case "video_url":
            return MediaPart(Modality.VIDEO, url=part.video_url, param=param)
        case "image":
            return MediaPart(Modality.IMAGE, data=part.image, param=param)
        case "video":
            return MediaPart(Modality.VIDEO, data=part.video, param=param)
        case _:
            raise InvalidRequest("an empty part", param=param)


def _response(reply_id: str, event: Event, *, timings: bool) -> gateway_pb2.ChatResponse:
    if isinstance(event, Delta):
        calls = [gateway_pb2.ToolCallDelta(**asdict(call)) for call in event.calls]
        return gateway_pb2.ChatResponse(
            id=reply_id,
            choice=event.choice,
            delta=event.text,
            reasoning=event.reasoning,
            tool_calls=calls,
        )
    if isinstance(event, ChoiceDone):
        return gateway_pb2.ChatResponse(
            id=reply_id, choice=event.choice, finish_reason=event.reason.value
        )
    return gateway_pb2.ChatResponse(
        id=reply_id,
        usage=gateway_pb2.Usage(**asdict(event.usage)),
        timings=gateway_pb2.Timings(**asdict(event.timings)) if timings else None,
    )


def _values(metadata: Any, name: str) -> list[str]:
    return [value for key, value in metadata or () if key == name and isinstance(value, str)]


def _first(metadata: Any, name: str) -> str:
    return next(iter(_values(metadata, name)), "")


def _refusing(handler: Handler, error: Unauthenticated) -> Handler:
    """The handler with its behaviour replaced by raising: the request is not even parsed."""

    async def unary(request: Any, context: Context) -> Any:
        raise error

    async def streaming(request: Any, context: Context) -> AsyncIterator[Any]:
        raise error
        yield  # type: ignore[unreachable]  # what makes it a generator

    if handler.response_streaming and handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(streaming)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(streaming)
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(unary)
    return grpc.unary_unary_rpc_method_handler(unary)
