"""The outermost layer of the REST face: request ids, keys, drain, errors, one log line a request.

Plain ASGI, so that streams pass untouched. The rpc interceptor's twin: the one place of this face
that catches everything, so that no client sees a traceback or another shape of error.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chiasm.errors import ChiasmError, Internal
from gateway.api.drain import Gate
from gateway.api.errors import error_response
from gateway.api.face import Face
from gateway.api.sse import EVENT_STREAM, error_frames

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready"})  # without a key
WATCHING_PATHS = OPEN_PATHS | {"/metrics"}  # also while draining, and not logged
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def request_id_of(given: str) -> str:
    """The client's request id if it is a sane one, else a new one."""
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)


class Front:
    """Wraps the whole application."""

    def __init__(self, app: ASGIApp, face: Face, gate: Gate) -> None:
        self._app = app
        self._face = face
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return  # no websockets, and nothing to do at start and end
        headers = Headers(scope=scope)
        request_id = request_id_of(headers.get("x-request-id", ""))
        lease = self._face.bodies.lease()
        scope.setdefault("state", {}).update(request_id=request_id, lease=lease)
        reply = _Reply(send, request_id, closing=lambda: self._gate.draining)
        began = time.perf_counter()
        try:
            await self._pass(scope, headers, receive, reply)
        except ChiasmError as error:
            await reply.fail(error, scope, receive)
        except Exception as error:  # the rpc interceptor of this face
            logger.error("%s %s failed", request_id, scope["path"], exc_info=error)
            await reply.fail(Internal("internal error"), scope, receive)
        finally:
            lease.close()
        if scope["path"] in WATCHING_PATHS:
            return
        self._face.metrics.requests.labels(str(reply.outcome)).inc()
        logger.info(
            "%s %s %s %s %.0f ms",
            request_id,
            scope["method"],
            scope["path"][:128],
            reply.outcome,
            (time.perf_counter() - began) * 1000,
        )

    async def _pass(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path not in OPEN_PATHS:  # the router matches this same string, so nothing slips by
            keys = headers.getlist("authorization")
            scope["state"]["tenant"] = self._face.keys.tenant(keys)
        if path in WATCHING_PATHS:
            await self._app(scope, receive, send)
            return
        with self._gate.enter(), self._face.tenants.enter(scope["state"]["tenant"]):
            await self._app(scope, receive, send)


class _Reply:
    """A `send` that adds headers and remembers how far the answer has come."""

    def __init__(self, send: Send, request_id: str, closing: Callable[[], bool]) -> None:
        self._send = send
        self._request_id = request_id
        self._closing = closing
        self._streaming = False
        self._ended = False
        self.outcome = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self._request_id
            if self._closing():
                headers["connection"] = "close"
            self.outcome = message["status"]
            self._streaming = headers.get("content-type", "").startswith(EVENT_STREAM)
        elif message["type"] == "http.response.body":
            self._ended = not message.get("more_body", False)
        await self._send(message)

    async def fail(self, error: ChiasmError, scope: Scope, receive: Receive) -> None:
        """An error status if there is none yet; else the last event of the stream."""
        if not self.outcome:
            await error_response(error)(scope, receive, self)
        elif not self._ended:
            self.outcome = error.http_status
            tail = error_frames(error) if self._streaming else b""
            await self({"type": "http.response.body", "body": tail, "more_body": False})
