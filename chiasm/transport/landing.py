"""Memory that peers write to by themselves, and who waits for which of their notifications.

Lives on the event loop. An agent that a lost writer may still have bytes under way to is replaced:
its connections are closed, and what arrives on them afterwards reaches nobody's memory.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable
from typing import Protocol

from chiasm.errors import Unavailable
from chiasm.transport.agent import TransferAgent
from chiasm.transport.base import Region
from chiasm.v1 import encoder_pb2

logger = logging.getLogger(__name__)

NOTICE_S = 5.0
"""How long a notification may take longer than the word on the stream that it was sent."""


class Arrivals:
    """Notifications that are expected, by what they say. Event loop's thread only.

    Args:
        on_count: Told how many there are whenever that changes: who hears of them looks for them
            only while there are any.
    """

    def __init__(self, on_count: Callable[[int], None]) -> None:
        self._on_count = on_count
        self._expected: dict[bytes, asyncio.Future[bool]] = {}
        self._listeners: dict[bytes, Callable[[], None]] = {}

    def __len__(self) -> int:
        return len(self._expected)

    def expect(self, notice: bytes, on_arrived: Callable[[], None] = lambda: None) -> None:
        """A grant goes out; once it has landed `on_arrived` is called, unless it is forgotten."""
        self._expected[notice] = asyncio.get_running_loop().create_future()
        self._listeners[notice] = on_arrived
        self._on_count(len(self))

    def put(self, notices: Iterable[bytes]) -> None:
        """They have come; those that nobody expects any more are dropped."""
        for notice in notices:
            future = self._expected.get(notice)
            if future is not None and not future.done():
                future.set_result(True)
                self._listeners.pop(notice)()

    def fail(self) -> None:
        """None of them will come."""
        for future in self._expected.values():
            if not future.done():
                future.set_result(False)

    async def wait(self, notice: bytes) -> bool:
        """Whether it came, now or within `NOTICE_S`; forgets it."""
        future = self._expected.get(notice)
        if future is None:
            return False
        try:
            async with asyncio.timeout(NOTICE_S):
                return await asyncio.shield(future)
        except TimeoutError:
            return False
        finally:
            self.forget(notice)

    def forget(self, notice: bytes) -> None:
        """Nobody waits for it; who does hears that it does not come."""
        self._listeners.pop(notice, None)
        future = self._expected.pop(notice, None)
        if future is not None and not future.done():
            future.set_result(False)
        self._on_count(len(self))


class Landing(Protocol):
    """One bank of a slab as NIXL's peers can reach it."""

    bank: int
    generation: int
    """Which of the agents that this memory has had is there now."""
    arrivals: Arrivals
    """Of grants of this memory."""

    @property
    def peer(self) -> encoder_pb2.Peer | None:
        """The receiving rank, for `FetchOpen`; None while its memory cannot be written."""
        ...

    @property
    def region(self) -> Region:
        """The whole bank."""
        ...

    async def renew(self, generation: int) -> None:
        """Replaces the agent of that generation, unless that has been done. Then nothing that was
        on its way to it can arrive any more."""
        ...


class LocalLanding:
    """Implements `Landing` for memory of this process.

    Args:
        region: The memory; registered as long as this is open.
        bank: Which bank of the slab it is.
        on_renewed: Called after each change of agent.
    """

    def __init__(
        self, region: Region, *, bank: int, on_renewed: Callable[[], None] = lambda: None
    ) -> None:
        self.bank = bank
        self.generation = 0
        self.arrivals = Arrivals(self._count)
        self._region = region
        self._on_renewed = on_renewed
        self._life = secrets.token_hex(8)
        self._agent: TransferAgent | None = None
        self._lock = asyncio.Lock()

    @property
    def region(self) -> Region:
        """See `Landing.region`."""
        return self._region

    @property
    def peer(self) -> encoder_pb2.Peer | None:
        """See `Landing.peer`."""
        if self._agent is None:
            return None
        return encoder_pb2.Peer(
            agent_name=self._agent.name,
            agent_epoch=self.generation,
            agent_metadata=self._agent.metadata,
            memory_type=self._region.memory_type,
        )

    async def open(self) -> None:
        """Starts the first agent. Raises Unavailable."""
        self._agent = await self._start()

    async def renew(self, generation: int) -> None:
        """See `Landing.renew`."""
        async with self._lock:
            if generation != self.generation:
                return
            old, self.generation = self._agent, generation + 1
            try:
                self._agent = await self._start()
                self._count(len(self.arrivals))
            except Unavailable as error:
                logger.error("%s; rows travel over grpc from here on", error)
                self._agent = None
            if old is not None:
                await asyncio.to_thread(old.close)
            logger.warning("the transfer agent was replaced: a writer was lost in mid-transfer")
        self._on_renewed()

    async def close(self) -> None:
        """Nobody can write to the memory any more."""
        async with self._lock:
            agent, self._agent = self._agent, None
            if agent is not None:
                await asyncio.to_thread(agent.close)

    def _count(self, num_expected: int) -> None:
        if self._agent is not None:
            self._agent.await_notices(num_expected)

    async def _start(self) -> TransferAgent:
        loop = asyncio.get_running_loop()
        name = f"{self._life}.{self.generation}"

        def heard(notices: list[bytes]) -> None:
            loop.call_soon_threadsafe(self.arrivals.put, notices)

        return await asyncio.to_thread(TransferAgent, (self._region,), on_notices=heard, name=name)
