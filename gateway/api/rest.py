"""Puts the REST face together."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

import chiasm
from gateway.api import admin, chat, completions
from gateway.api.drain import Gate
from gateway.api.errors import on_http_error
from gateway.api.face import Face
from gateway.api.front import Front
from gateway.api.openapi import describe


def build_app(face: Face, gate: Gate) -> FastAPI:
    """The ASGI application. Paths match exactly: no redirect from or to a trailing slash."""
    app = FastAPI(
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
