"""Channels to encoders, one for each life of an endpoint, kept while used and a while longer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from chiasm.channel import backs_off, connect
from chiasm.tls import PeerTls


@dataclass(frozen=True, slots=True)
class _Key:
    address: str
    epoch: int  # of the encoder
    version: int  # of our certificate


@dataclass(slots=True, eq=False)
class _Dialled:
    channel: grpc.aio.Channel
    users: int = 0


class ChannelPool:
    """Leases channels by address; closes the longest idle ones.

    Encoders come and go with new addresses, so idle channels must not pile up. Who leases one has
    just been told that the encoder is there, so what an earlier life at that address has left
    behind must not stand in the way: each life has a channel of its own, and one that failed to
    connect and waits before it tries again is replaced by one that tries now. A channel made with
    a certificate that has been replaced is leased no more.

    Args:
        max_idle: Channels kept that nobody uses.
        tls: What encoders are dialled with.
    """

    def __init__(self, *, max_idle: int = 16, tls: PeerTls | None = None) -> None:
        self._max_idle = max_idle
        self._tls = tls
        self._current: dict[_Key, _Dialled] = {}  # the longest idle first, those in use anywhere
        self._open: set[_Dialled] = set()  # these, and those that were replaced while in use

    @asynccontextmanager
    async def lease(self, address: str, epoch: int = 0) -> AsyncIterator[grpc.aio.Channel]:
        """A channel to that life of `address`; it stays open inside the block."""
        key = _Key(address, epoch, self._tls.version if self._tls else 0)
        dialled = self._current.pop(key, None)
        if dialled is None or backs_off(dialled.channel):
            dialled = _Dialled(connect(address, self._tls))
            self._open.add(dialled)
        self._current[key] = dialled
        dialled.users += 1
        try:
            await self._close_idle(key)
            yield dialled.channel
        finally:
            dialled.users -= 1
            if self._current.get(key) is dialled:  # it is the one used last
                self._current[key] = self._current.pop(key)
            await self._close_idle(key)

    async def close(self) -> None:
        """Closes every channel; calls on them break."""
        opened, self._open = self._open, set()
        self._current.clear()
        for dialled in opened:
            await dialled.channel.close(None)

    async def _close_idle(self, newest: _Key) -> None:
        """Those nobody will lease again, and those that are too many."""
        for key in [k for k in self._current if k.address == newest.address and k != newest]:
            if not self._current[key].users:
                del self._current[key]
        idle = [key for key, dialled in self._current.items() if not dialled.users]
        for key in idle[: max(0, len(idle) - self._max_idle)]:
            del self._current[key]
        kept = set(self._current.values())
        for dialled in [d for d in self._open if not d.users and d not in kept]:
            self._open.discard(dialled)
            await dialled.channel.close(None)
