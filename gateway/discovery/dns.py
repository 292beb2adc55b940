"""Addresses behind names: the headless services of a cluster, looked up again and again.

Every address is a peer of its own: gRPC's resolver would keep all calls on one connection.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

from gateway.discovery.base import Peer, PeerRole

logger = logging.getLogger(__name__)

Resolve = Callable[[str, int], Awaitable[frozenset[str]]]
"""(host, port) -> addresses to dial. Raises OSError when the lookup fails."""

INTERVAL_S = 3.0
_ROUND_S = 1.0  # how long a round waits for slow lookups; they count in a later one
_NOBODY = (socket.EAI_NONAME, socket.EAI_NODATA)  # an answer: no pod is ready behind the name


class DnsDiscovery:
    """Looks every name up each interval. One whose lookup fails keeps the addresses it had.

    Args:
        encoders: host:port, the host a name or an address.
        decoders: Likewise.
        resolve: Looks a name up.
        interval_s: Pause between rounds.
    """

    def __init__(
        self,
        *,
        encoders: tuple[str, ...],
        decoders: tuple[str, ...],
        resolve: Resolve | None = None,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._names = tuple(
            (role, host, int(port))
            for role, urls in ((PeerRole.ENCODER, encoders), (PeerRole.DECODER, decoders))
            for host, _, port in (url.rpartition(":") for url in urls)
        )
        self._resolve = resolve or getaddrinfo
        self._interval_s = interval_s
        self._known: dict[tuple[PeerRole, str, int], frozenset[str]] = {}
        self._lookups: dict[tuple[PeerRole, str, int], asyncio.Task[frozenset[str]]] = {}
        self._trouble: dict[str, str] = {}

    async def watch(self) -> AsyncIterator[frozenset[Peer]]:
        """Yields after the first round, and again whenever an address comes or goes."""
        told: frozenset[Peer] | None = None
        try:
            while True:
                await self._look_up()
                peers = frozenset(
                    Peer(role, address)
                    for (role, _, _), addresses in self._known.items()
                    for address in addresses
                )
                if peers != told:
                    told = peers
                    yield peers
                await asyncio.sleep(self._interval_s)
        finally:
            for task in self._lookups.values():
                task.cancel()

    async def _look_up(self) -> None:
        """One round. A lookup that hangs holds up no other name, and is not started twice."""
        for name in self._names:
            if name not in self._lookups:
                self._lookups[name] = asyncio.ensure_future(self._resolve(name[1], name[2]))
        await asyncio.wait(self._lookups.values(), timeout=_ROUND_S)
        for name, task in tuple(self._lookups.items()):
            if task.done():
                del self._lookups[name]
                self._take(name, task)

    def _take(self, name: tuple[PeerRole, str, int], task: asyncio.Task[frozenset[str]]) -> None:
        error = task.exception()
        if error is None:
            self._known[name] = task.result()
            self._say(name[1], "" if task.result() else "has no addresses")
        elif isinstance(error, OSError):
            if isinstance(error, socket.gaierror) and error.errno in _NOBODY:
                self._known[name] = frozenset()
            self._say(name[1], f"lookup failed: {error}")
        else:
            raise error

    def _say(self, host: str, trouble: str) -> None:
        if trouble and trouble != self._trouble.get(host):
            logger.warning("%s: %s", host, trouble)
        self._trouble[host] = trouble


async def getaddrinfo(host: str, port: int) -> frozenset[str]:
    """The system's resolver, in the loop's pool of threads."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return frozenset(
        f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"
        for family, _, _, _, address in found
    )
