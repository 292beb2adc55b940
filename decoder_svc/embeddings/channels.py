"""Channels to encoders, one per endpoint, kept while used and a while longer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from chiasm.channel import connect
from chiasm.tls import PeerTls

_Key = tuple[str, int]  # address, version of our certificate


class ChannelPool:
    """Leases channels by address; closes the longest idle ones.

    Encoders come and go with new addresses, so idle channels must not pile up. A channel made with
    a certificate that has been replaced is leased no more.

    Args:
        max_idle: Channels kept that nobody uses.
        tls: What encoders are dialled with.
    """

    def __init__(self, *, max_idle: int = 16, tls: PeerTls | None = None) -> None:
        self._max_idle = max_idle
        self._tls = tls
        self._channels: dict[_Key, grpc.aio.Channel] = {}
        self._users: dict[_Key, int] = {}
        self._idle: OrderedDict[_Key, None] = OrderedDict()

    @asynccontextmanager
    async def lease(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """A channel to `address` that stays open inside the block."""
        key = (address, self._tls.version if self._tls else 0)
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = connect(address, self._tls)
        self._users[key] = self._users.get(key, 0) + 1
        self._idle.pop(key, None)
        try:
            yield channel
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._idle[key] = None
            while len(self._idle) > self._max_idle:
                oldest, _ = self._idle.popitem(last=False)
                await self._channels.pop(oldest).close(None)

    async def close(self) -> None:
        """Closes every channel; calls on them break."""
        channels, self._channels = self._channels, {}
        self._idle.clear()
        for channel in channels.values():
            await channel.close(None)
