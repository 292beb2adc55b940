"""How rows come into this decoder: by NIXL where it and the encoder can, always over gRPC."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from chiasm.errors import Unavailable
from chiasm.telemetry import DecoderMetrics
from chiasm.transport.base import HOST_BANK, RANK_BANK, Receiver, Region
from chiasm.transport.grpc import StreamReceiver
from chiasm.transport.landing import Landing, LocalLanding
from chiasm.transport.nixl import NixlReceiver
from decoder_svc.embeddings.bank_channel import BankPort
from decoder_svc.embeddings.rank_landing import RankLanding
from decoder_svc.embeddings.slab import Slab

logger = logging.getLogger(__name__)

_INLINE_BYTES = 256 << 10  # with --transport auto; a picture of a small model is less


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
        self._rank: RankLanding | None = None
        self._inline_bytes = 0

    @property
    def transports(self) -> tuple[str, ...]:
        """What Describe says."""
        return ("nixl", "grpc") if self._landings else ("grpc",)

    async def offer(self, transport: str, bank: Region | BankPort | None) -> None:
        """Lets peers write into the slab, and into its second bank if there is one.

        Args:
            transport: `--transport`; nothing is offered with grpc.
            bank: Memory of this process, or of a rank's.

        Raises:
            ValueError: NIXL is asked for and cannot be used.
        """
        if transport == "grpc":
            return
        self._inline_bytes = _INLINE_BYTES if transport == "auto" else 0
        try:
            await self._offer(self._slab.region, HOST_BANK)
            if isinstance(bank, Region):
                await self._offer(bank, RANK_BANK)
        except Unavailable as error:
            if transport == "nixl":
                raise ValueError(f"--transport nixl: {error.message}") from None
            logger.info("%s: rows come over grpc", error.message)
            return
        if isinstance(bank, BankPort):
            self._rank = RankLanding(on_renewed=self._metrics.agent_renewals.inc)
            loop, attach = asyncio.get_running_loop(), self._rank.attach
            bank.listen(lambda channel: _attach_soon(loop, attach, channel))

    def open(self, fetch_id: bytes) -> Receiver:
        """See `chiasm.transport.OpenReceiver`."""
        stream = StreamReceiver(self._slab.write)
        if not self._landings:
            return stream
        return NixlReceiver(fetch_id, self._landings, stream, inline_bytes=self._inline_bytes)

    async def close(self) -> None:
        """Nobody writes into the slab any more."""
        for landing in self._local:
            await landing.close()
        if self._rank is not None:
            self._rank.detach()

    @property
    def _landings(self) -> Sequence[Landing]:
        return self._local if self._rank is None else [*self._local, self._rank]

    async def _offer(self, region: Region, bank: int) -> None:
        landing = LocalLanding(region, bank=bank, on_renewed=self._metrics.agent_renewals.inc)
        await landing.open()
        self._local.append(landing)


def _attach_soon(
    loop: asyncio.AbstractEventLoop, attach: Callable[[Connection], None], channel: Connection
) -> None:
    """From the engine's thread; a loop that has ended needs no rank."""
    if loop.is_closed():
        channel.close()
    else:
        loop.call_soon_threadsafe(attach, channel)
