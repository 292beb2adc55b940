"""The engine's side of memory that lies in a rank's process, which NIXL's peers write to.

Ranks die and are started again with other memory; what was on its way to the old is over then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from multiprocessing.connection import Connection

from chiasm.transport.base import RANK_BANK, Region
from chiasm.transport.landing import Arrivals
from chiasm.v1 import encoder_pb2
from decoder_svc.embeddings.bank_channel import At, Await, Heard, Message, Renew, hear, say

logger = logging.getLogger(__name__)


class RankLanding:
    """Implements `chiasm.transport.landing.Landing`. Event loop's thread only.

    Args:
        on_renewed: Called after each change of agent that was asked for.
    """

    bank = RANK_BANK

    def __init__(self, *, on_renewed: Callable[[], None] = lambda: None) -> None:
        self.generation = 0
        self.arrivals = Arrivals(lambda num_expected: self._say(Await(num_expected)))
        self._on_renewed = on_renewed
        self._channel: Connection | None = None
        self._at: At | None = None
        self._changed = asyncio.Event()
        self._lock = asyncio.Lock()

    @property
    def peer(self) -> encoder_pb2.Peer | None:
        """See `Landing.peer`."""
        if self._at is None:
            return None
        return encoder_pb2.Peer(
            rank=0,
            agent_name=self._at.agent_name,
            agent_epoch=self.generation,
            agent_metadata=self._at.metadata,
            memory_type=self._at.memory_type,
        )

    @property
    def region(self) -> Region:
        """See `Landing.region`."""
        assert self._at is not None, "asked while there is no rank"
        return self._at.region

    def attach(self, channel: Connection) -> None:
        """A rank has been started; it will say where its memory is."""
        self.detach()
        self._channel = channel
        asyncio.get_running_loop().add_reader(channel.fileno(), self._readable)

    def detach(self) -> None:
        """The rank is gone, if there was one, and its memory with it."""
        channel, self._channel = self._channel, None
        if channel is not None:
            asyncio.get_running_loop().remove_reader(channel.fileno())
            channel.close()
        self.generation += 1
        self._at = None
        self.arrivals.fail()
        self._changed.set()

    async def renew(self, generation: int) -> None:
        """See `Landing.renew`. Waits as long as the rank takes; one that hangs is ended."""
        async with self._lock:
            if generation != self.generation:
                return
            self.generation += 1
            self._at = None
            self._say(Renew())
            while self._at is None and self._channel is not None:
                self._changed.clear()
                await self._changed.wait()
            logger.warning("the rank's agent was replaced: a writer was lost in mid-transfer")
        self._on_renewed()

    def _say(self, message: Message) -> None:
        if self._channel is None:
            return
        try:
            say(self._channel, message)
        except OSError:
            self.detach()

    def _readable(self) -> None:
        while self._channel is not None:
            try:
                if not self._channel.poll():
                    return
                message = hear(self._channel)
            except (EOFError, OSError):
                self.detach()
                return
            if isinstance(message, At):
                self._at = message
                self._changed.set()
            elif isinstance(message, Heard):
                self.arrivals.put(message.notices)
