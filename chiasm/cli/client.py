"""The REST face as the commands use it: message parts, one answer, a stream of them."""

from __future__ import annotations

import base64
import json
import mimetypes
import ssl
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from chiasm.cli.failure import CommandFailed

DEFAULT_URL = "http://127.0.0.1:8000"

_REMOTE = ("http://", "https://", "data:")
_VIDEO_SUFFIXES = frozenset({".mp4", ".mov", ".m4v", ".webm", ".mkv", ".avi"})


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished answer. `timings` is empty unless they were asked for; milliseconds."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    timings: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """How a gateway is met whose door has TLS."""

    ca_file: str = ""
    """PEM file of the CA that signed its certificate; empty = the CAs known to everybody."""
    cert_file: str = ""
    """PEM file of a certificate to show, where the gateway asks for one."""
    key_file: str = ""
    """PEM file of its private key."""
    server_name: str = ""
    """DNS name that its certificate holds; empty = the host of the URL."""

    def context(self) -> ssl.SSLContext:
        """Raises CommandFailed for files that cannot be read."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
            if self.cert_file or self.key_file:
                context.load_cert_chain(self.cert_file, self.key_file or None)
        except OSError as error:
            names = ", ".join(filter(None, (self.ca_file, self.cert_file, self.key_file)))
            raise CommandFailed(f"{names}: {error.strerror or error}") from None
        return context


def media_part(source: str | Path) -> dict[str, Any]:
    """A content part for a file or a URL; files travel inside the request.

    Raises:
        CommandFailed: The file cannot be read.
    """
    text = str(source)
    suffix = Path(text.partition("?")[0]).suffix.lower()
    kind = (
        "video_url" if suffix in _VIDEO_SUFFIXES or text.startswith("data:video") else "image_url"
    )
    if not text.startswith(_REMOTE):
        try:
            data = Path(text).expanduser().read_bytes()
        except OSError as error:
            raise CommandFailed(f"{text}: {error.strerror}") from None
        media_type = mimetypes.guess_type(text)[0] or "application/octet-stream"
        text = f"data:{media_type};base64,{base64.b64encode(data).decode('ascii')}"
    return {"type": kind, kind: {"url": text}}


def user_message(sources: Iterable[str | Path], question: str) -> dict[str, Any]:
    """Media first, then the question."""
    parts = [media_part(source) for source in sources]
    return {"role": "user", "content": [*parts, {"type": "text", "text": question}]}


class Client:
    """Talks to one gateway. Use as an async context.

    Every method raises CommandFailed, with the gateway's own words where it sent any.

    Args:
        url: Root of the REST face.
        api_key: Sent as a bearer token; empty = none.
        timeout_s: Longest silence of the gateway.
        tls: How a URL of https is met.
        transport: Replaces the network, in tests.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str = "",
        timeout_s: float = 600.0,
        tls: Tls | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._url = url.rstrip("/")
        secured = tls if tls and self._url.startswith("https:") else None
        name = secured.server_name if secured else ""
        self._extensions = {"sni_hostname": name} if name else {}
        self._http = httpx.AsyncClient(
            base_url=self._url,
            headers=headers,
            verify=secured.context() if secured else True,
            timeout=httpx.Timeout(timeout_s, connect=5.0),
            limits=httpx.Limits(max_connections=None),
            transport=transport,
            trust_env=False,  # a proxy for the internet is not one for this machine
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def model(self) -> str:
        """The first model served."""
        response = await self._send(self._http.build_request("GET", "/v1/models"))
        models = json.loads(await response.aread())["data"]
        if not models:
            raise CommandFailed(f"{self._url} serves no model")
        return str(models[0]["id"])

    async def answer(self, request: dict[str, Any]) -> Answer:
        """One chat completion, whole."""
        response = await self._post(request)
        body = json.loads(await response.aread())
        usage = body.get("usage") or {}
        return Answer(
            text=body["choices"][0]["message"]["content"] or "",
            prompt_tokens=usage.get("prompt_tokens", 0),
            completion_tokens=usage.get("completion_tokens", 0),
            timings=body.get("timings") or {},
        )

    async def stream(self, request: dict[str, Any]) -> AsyncIterator[str]:
        """The pieces of one chat completion as they arrive."""
        response = await self._post(request | {"stream": True})
        try:
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise CommandFailed(event["error"].get("message", "the stream broke off"))
                for choice in event.get("choices", ()):
                    if piece := choice.get("delta", {}).get("content"):
                        yield piece
        except httpx.HTTPError as error:
            raise CommandFailed(f"{self._url} broke off: {_reason(error)}") from error
        finally:
            await response.aclose()

    async def _post(self, request: dict[str, Any]) -> httpx.Response:
        return await self._send(
            self._http.build_request("POST", "/v1/chat/completions", json=request)
        )

    async def _send(self, request: httpx.Request) -> httpx.Response:
        request.extensions |= self._extensions
        try:
            response = await self._http.send(request, stream=True)
            if response.is_success:
                return response
            await response.aread()
        except httpx.ConnectError as error:
            if isinstance(error.__cause__ and error.__cause__.__cause__, ssl.SSLError):
                raise CommandFailed(f"{self._url}: {_reason(error)}") from None
            raise CommandFailed(
                f"nothing answers at {self._url}; start it with `chiasm up`"
            ) from None
        except httpx.HTTPError as error:
            raise CommandFailed(f"{self._url}: {_reason(error)}") from error
        raise CommandFailed(f"{response.status_code}: {_error_message(response)}")


def _error_message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.reason_phrase


def _reason(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__
