"""How much the gateway takes in: requests and media bytes. Over a limit is 429 at the door.

Requests with media may take three quarters of the slots at most, so that a flood of pictures before
a slow encoder never shuts text out.
"""

from __future__ import annotations

from chiasm.errors import ResourceExhausted
from chiasm.telemetry import GatewayMetrics

_RETRY_AFTER_S = 1.0


class Admission:
    """Counts what is inside.

    Args:
        max_inflight: Requests.
        max_media_bytes: Bytes of media, all requests together.
        metrics: Where the bytes are shown.
    """

    def __init__(self, *, max_inflight: int, max_media_bytes: int, metrics: GatewayMetrics) -> None:
        self._max_inflight = max_inflight
        self._max_with_media = max(1, max_inflight - max_inflight // 4)
        self._max_bytes = max_media_bytes
        self._metrics = metrics
        self.inflight = 0
        self.with_media = 0
        self.media_bytes = 0

    def enter(self, *, media: bool) -> Ticket:
        """A slot for one request. Raises ResourceExhausted when there is none."""
        full = self.inflight >= self._max_inflight
        if full or (media and self.with_media >= self._max_with_media):
            raise ResourceExhausted(
                "the server takes no more requests now", retry_after_s=_RETRY_AFTER_S
            )
        return Ticket(self, media=media)

    def count(self, *, requests: int = 0, with_media: int = 0, media_bytes: int = 0) -> None:
        """Changes the counts; for tickets."""
        self.inflight += requests
        self.with_media += with_media
        self.media_bytes += media_bytes
        self._metrics.media_bytes.set(self.media_bytes)

    def reserve(self, num_bytes: int) -> None:
        """Counts media bytes. Raises ResourceExhausted when they do not fit."""
        if self.media_bytes + num_bytes > self._max_bytes:
            raise ResourceExhausted(
                "the server holds as many media as it may", retry_after_s=_RETRY_AFTER_S
            )
        self.count(media_bytes=num_bytes)

    def check(self) -> None:
        """Nothing is counted that no ticket holds, once all are gone."""
        assert min(self.inflight, self.with_media, self.media_bytes) >= 0
        assert self.inflight or not (self.with_media or self.media_bytes)


class Ticket:
    """One request's share of the gateway, held from entering to the end: a context manager."""

    def __init__(self, admission: Admission, *, media: bool) -> None:
        self._admission = admission
        self._media = media
        self._bytes = 0
        admission.count(requests=1, with_media=int(media))

    def reserve(self, num_bytes: int) -> None:
        """Counts media bytes until the request ends. Raises ResourceExhausted."""
        self._admission.reserve(num_bytes)
        self._bytes += num_bytes

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *failure: object) -> None:
        self._admission.count(requests=-1, with_media=-int(self._media), media_bytes=-self._bytes)
        self._bytes = 0
