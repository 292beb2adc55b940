"""Puts the REST face together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

import chiasm
from gateway.api import admin, chat, completions
from gateway.api.drain import Gate
from gateway.api.errors import on_http_error
from gateway.api.face import Face
from gateway.api.front import Front
from gateway.api.openapi import describe

Handler = Callable[[Request], Awaitable[Response]]

BUSY: Mapping[str, Handler] = {
    "/v1/chat/completions": chat.chat_completions,
    "/v1/completions": completions.completions,
}
"""What is asked for all the time, by POST. Described and routed like the rest, see `RestApp`."""


class RestApp(FastAPI):
    """Leads to busy routes directly: two dozen layers of a framework cost as much as the request.

    Args:
        busy: Applications by path, for POST.
        settings: FastAPI's.
    """

    def __init__(self, busy: Mapping[str, ASGIApp], **settings: Any) -> None:
        super().__init__(**settings)
        self._busy = busy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request. Whatever is no exact match is the router's."""
        busy = self._busy.get(scope.get("path", "")) if scope.get("method") == "POST" else None
        if busy is None:
            await super().__call__(scope, receive, send)
            return
        scope["app"] = self
        await busy(scope, receive, send)


def build_app(face: Face, gate: Gate) -> RestApp:
    """The ASGI application. Paths match exactly: no redirect from or to a trailing slash."""
    app = RestApp(
        {path: Front(_plain(handler), face, gate) for path, handler in BUSY.items()},
        title="chiasm",
        version=chiasm.__version__,
        description="OpenAI's API over vision encoders and language decoders that run apart.",
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        redirect_slashes=False,
        middleware=[Middleware(Front, face=face, gate=gate)],
        exception_handlers={HTTPException: on_http_error},
    )
    app.state.face = face
    app.state.gate = gate
    for module in (chat, completions, admin):
        app.include_router(module.router)
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    return app


def _plain(handler: Handler) -> ASGIApp:
    """A handler as an application."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        response = await handler(Request(scope, receive, send))
        await response(scope, receive, send)

    return serve
