"""How rows come into this decoder: by NIXL where it and the encoder can, always over gRPC."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from chiasm.config import DecoderConfig
from chiasm.errors import Unavailable
from chiasm.telemetry import DecoderMetrics
from chiasm.transport.base import HOST_BANK, Receiver
from chiasm.transport.grpc import StreamReceiver
from chiasm.transport.landing import Landing, LocalLanding
from chiasm.transport.nixl import NixlReceiver
from decoder_svc.embeddings.slab import Slab

logger = logging.getLogger(__name__)


class Inbound:
    """Makes the landing half of every fetch. Event loop's thread only.

    Args:
        slab: Where rows from the stream land.
        metrics: Counts agents that were replaced.
    """

    def __init__(self, slab: Slab, metrics: DecoderMetrics) -> None:
        self._slab = slab
        self._metrics = metrics
        self._local: list[LocalLanding] = []

    @property
    def transports(self) -> tuple[str, ...]:
        """What Describe says."""
        return ("nixl", "grpc") if self._landings else ("grpc",)

    async def offer_slab(self, config: DecoderConfig) -> None:
        """Lets peers write into the slab, unless `--transport` says otherwise.

        Raises:
            ValueError: NIXL is asked for and cannot be used.
        """
        if config.transport == "grpc":
            return
        landing = LocalLanding(
            self._slab.region, bank=HOST_BANK, on_renewed=self._metrics.agent_renewals.inc
        )
        try:
            await landing.open()
        except Unavailable as error:
            if config.transport == "nixl":
                raise ValueError(f"--transport nixl: {error.message}") from None
            logger.info("%s: rows come over grpc", error.message)
            return
        self._local.append(landing)

    def open(self, fetch_id: bytes) -> Receiver:
        """See `chiasm.transport.OpenReceiver`."""
        stream = StreamReceiver(self._slab.write)
        if not self._landings:
            return stream
        return NixlReceiver(fetch_id, self._landings, stream)

    async def close(self) -> None:
        """Nobody writes into the slab any more."""
        for landing in self._local:
            await landing.close()

    @property
    def _landings(self) -> Sequence[Landing]:
        return self._local
