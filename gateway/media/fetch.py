"""Brings the bytes of one medium in: inline bytes, data, http, https and file URLs.

Every hop is checked by `HostGuard`; time and size are capped; no proxy, cookie or credential.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

import aiohttp
from yarl import URL

from chiasm.config.gateway import MediaConfig
from chiasm.errors import ChiasmError, InvalidMedia, TooLarge
from chiasm.plan import Modality
from gateway.media.data_uri import is_data_uri, parse_data_uri
from gateway.media.guard import CANNOT_FETCH, GuardedResolver, HostGuard, parse_literal
from gateway.messages import MediaPart

_REDIRECTS = (301, 302, 303, 307, 308)
_CHUNK_BYTES = 1 << 18
_OFF_LOOP_BYTES = 1 << 22  # data URIs above this, most of a millisecond, are decoded in a thread
_MAX_URL_CHARS = 8192

Reserve = Callable[[int], None]
"""Counts bytes before they are held; raises ResourceExhausted when there is no room."""


class MediaFetcher:
    """Owns the HTTP session. Call `close` at the end.

    Args:
        config: Limits and policy.
        guard: Checks hosts; made from the config unless given.
        threads: For decoding and reading files; None = the event loop's.
    """

    def __init__(
        self,
        config: MediaConfig,
        *,
        guard: HostGuard | None = None,
        threads: ThreadPoolExecutor | None = None,
    ) -> None:
        self._config = config
        self._guard = guard or HostGuard(
            config.allowed_media_domains, allow_private=config.allow_private_media
        )
        root = config.allowed_local_media_path
        self._root = Path(root).resolve(strict=True) if root else None
        self._threads = threads
        self._session: aiohttp.ClientSession | None = None

    async def fetch(self, part: MediaPart, reserve: Reserve) -> bytes:
        """The bytes of one part.

        Raises:
            InvalidMedia: It may not or cannot be fetched.
            TooLarge: Over this modality's byte limit.
            ResourceExhausted: From `reserve`.
        """
        limit = self._limit(part.modality)
        if part.data is not None:
            data = part.data
        elif is_data_uri(part.url or ""):
            data = await self._decode(part, limit)
        else:
            return await self._fetch_url(part, limit, reserve)
        if len(data) > limit:
            raise TooLarge(f"the medium is larger than {limit} bytes", param=part.param)
        reserve(len(data))
        return data

    async def close(self) -> None:
        """Closes the session and the resolver."""
        self._guard.close()
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _limit(self, modality: Modality) -> int:
        image = modality is Modality.IMAGE
        return self._config.max_image_bytes if image else self._config.max_video_bytes

    async def _decode(self, part: MediaPart, limit: int) -> bytes:
        url = part.url or ""
        if len(url) <= _OFF_LOOP_BYTES:
            return parse_data_uri(url, max_bytes=limit, param=part.param)
        parse = partial(parse_data_uri, url, max_bytes=limit, param=part.param)
        return await asyncio.get_running_loop().run_in_executor(self._threads, parse)

    async def _fetch_url(self, part: MediaPart, limit: int, reserve: Reserve) -> bytes:
        url = (part.url or "").strip()
        if len(url) > _MAX_URL_CHARS:
            raise InvalidMedia("the URL is too long", param=part.param)
        if url[:5].lower() == "file:":
            loop = asyncio.get_running_loop()
            data = await loop.run_in_executor(
                self._threads, self._read_file, url, limit, part.param
            )
            reserve(len(data))
            return data
        try:
            async with asyncio.timeout(self._config.fetch_timeout_s):
                return await self._follow(url, limit, reserve, part.param)
        except ChiasmError:
            raise
        except (aiohttp.ClientError, OSError, ValueError):  # TimeoutError is an OSError
            raise InvalidMedia(CANNOT_FETCH, param=part.param) from None

    async def _follow(self, url: str, limit: int, reserve: Reserve, param: str) -> bytes:
        """Follows redirects by hand: each hop passes the guard like the first."""
        hop: str | URL = url
        for _ in range(self._config.max_redirects + 1):
            target = self._guard.check_url(hop, param=param)
            # aiohttp never asks its resolver about IP literals, so they are checked here.
            if parse_literal(target.raw_host or "") is not None:
                await self._guard.addresses(target.raw_host or "", 0)
            async with self._http().get(target, allow_redirects=False) as response:
                if response.status in _REDIRECTS and "Location" in response.headers:
                    hop = target.join(URL(response.headers["Location"]))
                    continue
                if response.status != 200:
                    raise InvalidMedia(CANNOT_FETCH, param=param)
                return await _read_body(response, limit, reserve, param)
        raise InvalidMedia(f"more than {self._config.max_redirects} redirects", param=param)

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # No DNS cache and no connection reuse across names: each dial is a checked dial.
                connector=aiohttp.TCPConnector(
                    resolver=GuardedResolver(self._guard), use_dns_cache=False, limit=256
                ),
                timeout=aiohttp.ClientTimeout(
                    total=self._config.fetch_timeout_s, sock_connect=self._config.connect_timeout_s
                ),
                auto_decompress=False,  # no bombs: what is counted is what travels
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
                headers={"User-Agent": "chiasm", "Accept-Encoding": "identity"},
            )
        return self._session

    def _read_file(self, url: str, limit: int, param: str) -> bytes:
        """Below the allowed root only, symlinks resolved before the comparison."""
        if self._root is None:
            raise InvalidMedia("file URLs are not allowed here", param=param)
        try:
            parts = urlsplit(url)
            if parts.netloc not in ("", "localhost"):
                raise InvalidMedia("file URLs name no host", param=param)
            path = Path(unquote(parts.path)).resolve(strict=True)
            if not path.is_relative_to(self._root) or not path.is_file():
                raise InvalidMedia(CANNOT_FETCH, param=param)
            with path.open("rb") as file:
                data = file.read(limit + 1)
        except (OSError, ValueError, RuntimeError):
            raise InvalidMedia(CANNOT_FETCH, param=param) from None
        if len(data) > limit:
            raise TooLarge(f"the medium is larger than {limit} bytes", param=param)
        return data


async def _read_body(
    response: aiohttp.ClientResponse, limit: int, reserve: Reserve, param: str
) -> bytes:
    """Counts while it streams: a declared length is a hint, never a promise."""
    if (response.content_length or 0) > limit:
        raise TooLarge(f"the medium is larger than {limit} bytes", param=param)
    body = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
        if len(body) + len(chunk) > limit:
            raise TooLarge(f"the medium is larger than {limit} bytes", param=param)
        reserve(len(chunk))
        body += chunk
    return bytes(body)
