"""All media of one request: fetched together, each once, and their headers read in threads."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from chiasm.config.gateway import MediaConfig
from chiasm.errors import InvalidRequest
from chiasm.plan import Modality
from gateway.media.data_uri import is_data_uri
from gateway.media.fetch import MediaFetcher, Reserve
from gateway.media.header import MediaHeader, read_header
from gateway.messages import MediaPart

_ON_LOOP_BYTES = 3 << 19  # of pictures: a millisecond, and a thread costs a tenth of one
_THREADS = 4  # for all requests together: pictures wait here, text never does


@dataclass(frozen=True, slots=True)
class Medium:
    """One part's bytes and what they are."""

    part: MediaPart
    data: bytes
    sha256: bytes
    header: MediaHeader


class Intake:
    """Owns the fetcher and the threads that decode and read headers. Call `close` at the end."""

    def __init__(self, config: MediaConfig, *, fetcher: MediaFetcher | None = None) -> None:
        self._config = config
        self._limits = _per_kind(config.limit_mm_per_prompt)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="media")
        self._fetcher = fetcher or MediaFetcher(config, threads=self._threads)

    def check_counts(self, parts: Sequence[MediaPart]) -> None:
        """Raises InvalidRequest when there are more media than one request may have."""
        if len(parts) > self._config.max_items:
            raise InvalidRequest(
                f"{len(parts)} media in one request; at most {self._config.max_items}",
                param=parts[self._config.max_items].param,
            )
        for modality, most in self._limits.items():
            of_kind = [part for part in parts if part.modality is modality]
            if len(of_kind) > most:
                raise InvalidRequest(
                    f"{len(of_kind)} {modality.value}s in one request; at most {most}",
                    param=of_kind[most].param,
                )

    async def fetch(self, parts: Sequence[MediaPart], reserve: Reserve) -> list[bytes]:
        """The bytes of every part, in order; a URL that is named twice is read once.

        Raises:
            ChiasmError: Of the first part that fails; the rest is cancelled.
        """
        if len(parts) == 1:
            return [await self._fetcher.fetch(parts[0], reserve)]
        tasks: dict[tuple[Modality, str | int], asyncio.Task[bytes]] = {}
        keys = [(part.modality, _identity(part)) for part in parts]
        try:
            async with asyncio.TaskGroup() as group:
                for key, part in zip(keys, parts, strict=True):
                    if key not in tasks:
                        tasks[key] = group.create_task(self._fetcher.fetch(part, reserve))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [tasks[key].result() for key in keys]

    async def read(self, parts: Sequence[MediaPart], data: Sequence[bytes]) -> list[Medium]:
        """Hashes and headers; off the event loop, unless that is most of a short work.

        Raises InvalidMedia or TooLarge.
        """
        pictures = all(part.modality is Modality.IMAGE for part in parts)
        if pictures and sum(map(len, data)) <= _ON_LOOP_BYTES:
            return [self._read(part, one) for part, one in zip(parts, data, strict=True)]
        loop = asyncio.get_running_loop()
        jobs = [
            loop.run_in_executor(self._threads, self._read, part, one)
            for part, one in zip(parts, data, strict=True)
        ]
        try:
            return await asyncio.gather(*jobs)
        finally:
            for job in jobs:
                job.cancel()

    async def close(self) -> None:
        """Ends fetches and threads."""
        await self._fetcher.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _read(self, part: MediaPart, data: bytes) -> Medium:
        header = read_header(
            data,
            part.modality,
            max_pixels=self._config.max_image_pixels,
            max_decode_bytes=self._config.max_decode_bytes,
            param=part.param,
        )
        return Medium(part, data, hashlib.sha256(data).digest(), header)


def _identity(part: MediaPart) -> str | int:
    """What is fetched once. Of data URIs the object: to hash a megabyte of text takes its time."""
    if part.url is None or is_data_uri(part.url):
        return id(part.url or part.data)
    return part.url


def _per_kind(limits: Sequence[str]) -> dict[Modality, int]:
    """`image=8` and the like. Raises ValueError."""
    found: dict[Modality, int] = {}
    for limit in limits:
        kind, _, count = limit.partition("=")
        if kind not in set(Modality) or not count.isdecimal():
            raise ValueError(f"--limit-mm-per-prompt {limit!r}: write image=N or video=N")
        found[Modality(kind)] = int(count)
    return found
