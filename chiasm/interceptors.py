"""Server-side interceptor: every error leaves as a status of the table, with its detail attached.

One of the few places that catch everything: what is not a ChiasmError is logged with its traceback
and answered as Internal, without one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from chiasm.errors import ERROR_METADATA_KEY, ChiasmError, Internal

logger = logging.getLogger(__name__)

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]  # a handler or None


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Turns raised `ChiasmError`s into gRPC statuses."""

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """Wraps the handler; unknown methods pass through."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        if handler.response_streaming:
            behaviour = handler.stream_stream if handler.request_streaming else handler.unary_stream
            wrapped = guarded(behaviour, method)
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
        else:
            behaviour = handler.stream_unary if handler.request_streaming else handler.unary_unary
            wrapped = _unary(behaviour, method)
            make = (
                grpc.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_unary_rpc_method_handler
            )
        return make(
            wrapped,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _unary(behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
    async def handle(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await behaviour(request, context)
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except Exception as error:  # the rpc interceptor
            await _abort(context, error, method)

    return handle


def guarded(behaviour: Callable[..., Any], method: str) -> Callable[..., Any]:
    """A behaviour that streams, whose errors leave by `context.abort`."""

    async def handle(
        request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        try:
            async for response in behaviour(request, context):
                yield response
        except (grpc.aio.AbortError, asyncio.CancelledError, GeneratorExit):
            raise
        except Exception as error:  # the rpc interceptor
            await _abort(context, error, method)

    return handle


async def _abort(
    context: grpc.aio.ServicerContext[Any, Any], error: Exception, method: str
) -> None:
    if not isinstance(error, ChiasmError):
        logger.error("%s failed", method, exc_info=error)
        error = Internal("internal error")
    await context.abort(
        error.grpc_status,
        error.message,
        trailing_metadata=((ERROR_METADATA_KEY, error.detail().SerializeToString()),),
    )
