"""Channels to encoders, one per endpoint, kept while used and a while longer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from chiasm.channel import connect


class ChannelPool:
    """Leases channels by address; closes the longest idle ones.

    Encoders come and go with new addresses, so idle channels must not pile up.

    Args:
        max_idle: Channels kept that nobody uses.
    """

    def __init__(self, *, max_idle: int = 16) -> None:
        self._max_idle = max_idle
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._users: dict[str, int] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()

    @asynccontextmanager
    async def lease(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """A channel to `address` that stays open inside the block."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = connect(address)
        self._users[address] = self._users.get(address, 0) + 1
        self._idle.pop(address, None)
        try:
            yield channel
        finally:
            self._users[address] -= 1
            if not self._users[address]:
                del self._users[address]
                self._idle[address] = None
            while len(self._idle) > self._max_idle:
                oldest, _ = self._idle.popitem(last=False)
                await self._channels.pop(oldest).close(None)

    async def close(self) -> None:
        """Closes every channel; calls on them break."""
        channels, self._channels = self._channels, {}
        self._idle.clear()
        for channel in channels.values():
            await channel.close(None)
