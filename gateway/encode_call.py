"""One Encode of one run at one encoder. The open stream is the lease on its rows.

Says what became ready; who else is asked, and what follows a failure, is decided in `Lease`.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Protocol

from chiasm import bundles
from chiasm.errors import ChiasmError, Unavailable
from chiasm.plan import Source
from chiasm.telemetry import GatewayMetrics
from chiasm.v1 import common_pb2, encoder_pb2
from gateway.clients import EncodeStream
from gateway.clients.encoder import send_media
from gateway.discovery import Fleet
from gateway.order import Item, Run, cause_error
from gateway.routing import Charge, Endpoint
from gateway.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Scope:
    """What all leases of one request share."""

    context: common_pb2.RequestContext
    fleet: Fleet
    decoder: Endpoint
    timeline: Timeline
    metrics: GatewayMetrics
    hedge_after_s: float = 0.0
    """0 = never."""


class Watcher(Protocol):
    """Whom a call tells."""

    def call_accepted(self) -> None:
        """The encoder has taken the run in."""

    def call_ready(self, call: EncodeCall) -> None:
        """The first rows of this call are ready."""

    def call_whole(self) -> None:
        """All rows of the run are ready."""


class EncodeCall:
    """Books its work when made. Call `run` once, or `release`.

    Args:
        run: What to encode.
        item: Whose bytes are sent.
        endpoint: The encoder.
        scope: The request's.
        watcher: Whom to tell.
    """

    def __init__(
        self, run: Run, item: Item, endpoint: Endpoint, scope: Scope, watcher: Watcher
    ) -> None:
        self.endpoint = endpoint
        self.ready = False
        """Whether any rows are."""
        self._run = run
        self._item = item
        self._scope = scope
        self._watcher = watcher
        self._encode_id = secrets.token_bytes(16)
        self._charge: Charge = scope.fleet.encoders.book(endpoint, run.key, run.patches)
        self._stream: EncodeStream | None = None
        self._let_go = False

    @property
    def source(self) -> Source:
        """Where the decoder fetches the rows."""
        return Source(self._encode_id, self.endpoint.advertised, self.endpoint.epoch)

    async def run(self, *, repair: bool) -> None:
        """Returns once its rows are needed no more; raises ChiasmError when they cannot be had.

        Args:
            repair: The rows were promised before, and lost.
        """
        scope, run = self._scope, self._run
        try:
            if self._let_go:  # before it had begun: the decoder knew the prompt
                return
            client = scope.fleet.encoder(self.endpoint.address)
            self._stream = stream = client.encode(
                timeout_s=scope.timeline.remaining_s(),
                bundled=bundles.FEATURE in self.endpoint.features,
            )
            start = encoder_pb2.EncodeStart(
                context=scope.context,
                encode_id=self._encode_id,
                plan=self._item.plan.to_proto(),
                frames=run.frames.to_proto() if run.frames else None,
                rows=run.rows.to_proto() if run.frames else None,
                encoder_epoch=self.endpoint.epoch,
                repair=repair,
            )
            try:
                await stream.send(encoder_pb2.EncodeRequest(start=start))
                await self._read(stream)
            finally:
                await stream.close()
        except ChiasmError:
            if not self._let_go:  # else it ends as it likes: nobody waits for these rows
                raise
        finally:
            self.release()

    async def let_go(self) -> None:
        """The rows have landed, or are not needed: the encoder may end the stream."""
        self._let_go = True
        if self._stream is not None:
            await self._stream.half_close()

    def release(self) -> None:
        """Takes the work off the encoder's seat. Idempotent."""
        self._charge.release()

    async def _read(self, stream: EncodeStream) -> None:
        rows_ready = 0
        async for message in stream:
            kind = message.WhichOneof("kind")
            if kind == "accepted":
                self._watcher.call_accepted()
                if message.accepted.media_needed:
                    await send_media(stream, self._item.data)
            elif kind == "ready":
                rows_ready += message.ready.rows.end - message.ready.rows.begin
                if not self.ready:
                    self.ready = True
                    self._watcher.call_ready(self)
                if rows_ready >= len(self._run.rows):
                    self._watcher.call_whole()
            elif kind == "done":
                self.release()
                spent_s = (message.done.preprocess_ms + message.done.forward_ms) / 1e3
                self._scope.fleet.encoders.succeeded(
                    self.endpoint, pace_s=spent_s / self._run.patches
                )
                self._watcher.call_whole()
            elif kind == "error":
                error = message.error
                raise cause_error(error.cause, error.message, param=self._item.param)
        if not self._let_go:
            raise Unavailable("the encoder ended the stream before its rows had landed")
