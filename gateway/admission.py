"""How much the gateway takes in: requests, media bytes, pictures being decoded.

Who finds no room waits in a line that is bounded and fair to tenants; over that is 429. Requests
with media stand in a lane of their own before they join the others, and take three quarters of the
slots at most: a flood of pictures before a slow encoder never shuts text out.
"""

from __future__ import annotations

import asyncio

from chiasm.config import GatewayConfig
from chiasm.errors import ResourceExhausted
from chiasm.telemetry import GatewayMetrics
from gateway.lane import Lane
from gateway.tenants import Tenants
from gateway.timeline import Timeline

_RETRY_AFTER_S = 1.0
_FIRST_PAUSE_S = 0.05  # before a service that was full is asked again
_LONGEST_PAUSE_S = 1.0
_SHARE = 0.9  # of the time left that may be spent waiting: a refusal comes before the deadline


class Admission:
    """Counts what is inside.

    Args:
        config: Slots, lines, bytes of media.
        metrics: Where the counts are shown.
        tenants: What each key may use.
    """

    def __init__(
        self,
        config: GatewayConfig,
        *,
        metrics: GatewayMetrics,
        tenants: Tenants | None = None,
    ) -> None:
        slots, line = config.admission.max_inflight, config.admission.max_queued
        self.metrics = metrics
        self.tenants = tenants or Tenants()
        self.requests = Lane(slots, max_waiting=line)
        self.with_media = Lane(max(1, slots - slots // 4), max_waiting=line)
        self.decodes = Lane(config.media.max_decode_bytes, max_waiting=line, what="large media")
        self.queue_timeout_s = config.admission.queue_timeout_s
        self._max_bytes = config.media.max_bytes_in_flight
        self._max_decode_bytes = config.media.max_decode_bytes // config.workers
        self.media_bytes = 0
        metrics.queued.set_function(lambda: self.queued)

    @property
    def inflight(self) -> int:
        """Requests inside."""
        return self.requests.inside

    @property
    def queued(self) -> int:
        """Requests that wait for their turn."""
        return self.requests.waiting + self.with_media.waiting + self.decodes.waiting

    def ticket(self, tenant: bytes, timeline: Timeline, *, media: bool) -> Ticket:
        """One request's share, to be entered: `async with`."""
        return Ticket(self, tenant, timeline, media=media)

    def count(self, media_bytes: int) -> None:
        """Changes the count of media bytes; for tickets. Raises ResourceExhausted."""
        if media_bytes > 0 and self.media_bytes + media_bytes > self._max_bytes:
            raise ResourceExhausted(
                "the server holds as many media as it may", retry_after_s=_RETRY_AFTER_S
            )
        self.media_bytes += media_bytes
        self.metrics.media_bytes.set(self.media_bytes)

    def resize_decodes(self, encoders: int) -> None:
        """How many encoders there are to decode."""
        capacity = self._max_decode_bytes * max(1, encoders)
        if capacity != self.decodes.capacity:
            self.decodes.resize(capacity)

    def check(self) -> None:
        """Nothing is counted that no ticket holds, once all are gone."""
        for lane in (self.requests, self.with_media, self.decodes):
            lane.check()
        assert self.media_bytes >= 0
        assert self.requests.inside or not (self.media_bytes or self.decodes.inside)


class Ticket:
    """One request's share of the gateway, held from entering to the end: an async context manager.

    Args:
        admission: Whose share.
        tenant: In whose line to stand.
        timeline: The request's clock.
        media: Whether it has any.
    """

    def __init__(
        self, admission: Admission, tenant: bytes, timeline: Timeline, *, media: bool
    ) -> None:
        self._admission = admission
        self._tenant = tenant
        self._timeline = timeline
        self._media = media
        self._held: list[tuple[Lane, int]] = []
        self._decoding = 0
        self._bytes = 0
        self._waited_s = 0.0
        self._wait_until = timeline.now() + timeline.remaining_s() * _SHARE
        self._pause_s = _FIRST_PAUSE_S

    def reserve(self, num_bytes: int) -> None:
        """Counts media bytes until the request ends. Raises ResourceExhausted."""
        self._admission.count(num_bytes)
        self._bytes += num_bytes

    async def decode(self, num_bytes: int, *, encoders: int) -> None:
        """Waits until so much memory may be used for decoding. Raises ResourceExhausted."""
        if num_bytes:
            self._admission.resize_decodes(encoders)
            self._decoding = await self._enter(self._admission.decodes, weight=num_bytes)

    def decoded(self) -> None:
        """Nothing of it is left to be decoded. Idempotent."""
        if self._decoding:
            self._admission.decodes.leave(self._decoding)
            self._decoding = 0

    async def again(self, full: ResourceExhausted) -> None:
        """The services are full: makes way, and waits to be let in once more.

        Raises:
            ResourceExhausted: The wait in all was too long; `full` itself, if there is none.
        """
        if self._patience_s() <= 0:
            raise full
        lane = self._admission.with_media if self._media else self._admission.requests
        self.decoded()
        self._leave(refused=lane)
        pause_s, self._pause_s = self._pause_s, min(_LONGEST_PAUSE_S, self._pause_s * 2)
        pause_s = min(pause_s, self._patience_s())
        await asyncio.sleep(pause_s)
        self._waited_s += pause_s
        await self._take_slots(first=True)

    async def __aenter__(self) -> Ticket:
        """Waits for a slot. Raises ResourceExhausted."""
        await self._take_slots(first=False)
        return self

    async def __aexit__(self, *failure: object) -> None:
        self.decoded()
        self._leave()
        self._admission.count(-self._bytes)
        self._bytes = 0

    async def _take_slots(self, *, first: bool) -> None:
        lanes = [self._admission.with_media] if self._media else []
        try:
            for lane in (*lanes, self._admission.requests):
                self._held.append((lane, await self._enter(lane, first=first)))
        except BaseException:
            self._leave()
            raise

    def _leave(self, refused: Lane | None = None) -> None:
        while self._held:
            lane, units = self._held.pop()
            lane.leave(units, refused=lane is refused)

    async def _enter(self, lane: Lane, *, weight: int = 1, first: bool = False) -> int:
        began = self._timeline.now()
        units = await lane.enter(
            (self._tenant, self._media), within_s=self._patience_s(), weight=weight, first=first
        )
        self._waited_s += self._timeline.now() - began
        return units

    def _patience_s(self) -> float:
        """How much longer it may wait, in all its lines together."""
        left_s = self._wait_until - self._timeline.now()
        return max(0.0, min(left_s, self._admission.queue_timeout_s - self._waited_s))
