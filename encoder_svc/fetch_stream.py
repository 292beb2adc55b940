"""The shell around one `FetchSession`: reads the stream, makes its writes, sends what it says."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress

from chiasm.errors import ChiasmError
from chiasm.telemetry import EncoderMetrics
from chiasm.transport.base import Outbound, Sender, WriteFailed
from chiasm.v1 import encoder_pb2
from encoder_svc.fetch_session import FetchSession, Write

logger = logging.getLogger(__name__)


class FetchStream:
    """Runs one session to its end.

    Args:
        session: Decides.
        requests: The decoder's messages after the opening.
        outbound: Makes the transport's writing half.
        peers: The ranks that receive.
        metrics: Counts transfers.
    """

    def __init__(
        self,
        session: FetchSession,
        requests: AsyncIterator[encoder_pb2.FetchRequest],
        *,
        outbound: Outbound,
        peers: list[encoder_pb2.Peer],
        metrics: EncoderMetrics,
    ) -> None:
        self._session = session
        self._requests = requests
        self._metrics = metrics
        # One message waits while one is being sent: a slow reader holds up the writer.
        self._out: asyncio.Queue[encoder_pb2.FetchResponse | None] = asyncio.Queue(maxsize=1)
        self._outbound, self._peers = outbound, peers
        self._sender: Sender = outbound.open(self._out.put, session.opening.fetch_id, peers)
        self._wake = asyncio.Event()
        self._idle = False  # the driver waits
        self._begun: tuple[Write, float] | None = None  # a write under way, and since when
        self._writing: asyncio.Future[int] | None = None
        session.wake = self._changed

    async def responses(self, *, grace_s: float) -> AsyncGenerator[encoder_pb2.FetchResponse, None]:
        """What to send, until the session has ended. Closing it early means the stream broke.

        Args:
            grace_s: How long the Encode it names may be late.
        """
        loop = asyncio.get_running_loop()
        grace = loop.call_later(grace_s, self._session.grace_over)
        reacher = asyncio.create_task(self._reach())
        reader = asyncio.create_task(self._read())
        driver = asyncio.create_task(self._drive())
        try:
            while (response := await self._out.get()) is not None:
                yield response
        finally:
            grace.cancel()
            self._session.broke()  # after Quiesced this changes nothing
            for task in (reacher, reader, driver):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    def _changed(self) -> None:
        # A write alone is begun at once: other tasks would come before the driver's next turn.
        if self._idle and not self._wake.is_set() and (write := self._session.take_write()):
            self._begin(write)
        self._wake.set()
        if self._session.stopping and self._writing is not None:
            self._writing.cancel()

    async def _reach(self) -> None:
        """The first time this takes a while; the session holds its place meanwhile."""
        self._session.reached(await self._outbound.reach(self._peers))

    async def _read(self) -> None:
        async for request in self._requests:
            match request.WhichOneof("kind"):
                case "grant":
                    self._session.grant(request.grant)
                case "cancel":
                    self._session.cancel()
        # The decoder half-closed: no grant will come, so nothing more can be wanted.
        self._session.half_closed()

    async def _drive(self) -> None:
        while True:
            # Asked before the outputs are taken: what ends the session is in them then.
            ended = self._session.ended
            self._wake.clear()
            if self._begun is not None:
                await self._finish(*self._begun)
            while (output := self._session.take()) is not None:
                if isinstance(output, Write):
                    self._begin(output)
                    assert self._begun is not None
                    await self._finish(*self._begun)
                else:
                    await self._out.put(output)
            if ended:
                break
            await self._pause()
        await self._out.put(None)

    async def _pause(self) -> None:
        """Until there is something to do; the session hears of a write's end even when this task is
        cancelled here."""
        self._idle = True
        try:
            await self._wake.wait()
        except asyncio.CancelledError:
            if self._begun is not None:
                await self._finish(*self._begun)
            raise
        finally:
            self._idle = False

    def _begin(self, write: Write) -> None:
        self._begun = write, time.perf_counter()
        self._writing = asyncio.ensure_future(
            self._sender.write(
                write.segment,
                seq=write.seq,
                rows=write.rows,
                source=write.buffer,
                destinations=write.destinations,
            )
        )

    async def _finish(self, write: Write, began: float) -> None:
        """Waits for a write; the session hears of its end even when this task is cancelled."""
        assert self._writing is not None
        crc32, failure = None, None
        try:
            await asyncio.wait((self._writing,))
        finally:
            self._writing.cancel()
            while not self._writing.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait((self._writing,))
            try:
                crc32 = self._writing.result()
            except WriteFailed as error:
                failure = error.with_traceback(None)  # it would keep this frame, and the rows
            except (asyncio.CancelledError, ChiasmError):
                pass
            self._writing = self._begun = None
            if failure is None:
                self._session.write_ended(crc32)
            else:
                self._note(failure, write)
                self._session.write_failed(aborted=failure.aborted)
        if crc32 is not None:
            self._metrics.transfers.seconds.observe(time.perf_counter() - began)
            nbytes = sum(d.length for d in write.destinations)
            self._metrics.transfers.nbytes.labels(write.destinations[0].memory_type).inc(nbytes)

    def _note(self, failure: WriteFailed, write: Write) -> None:
        self._metrics.transfers.unwritten.inc()
        logger.warning(
            "fetch %s: a write to %s failed (%s): what is left goes over grpc",
            self._session.opening.fetch_id.hex()[:8],
            write.destinations[0].agent_name or "the stream",
            failure,
        )
