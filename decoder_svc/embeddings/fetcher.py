"""The hands of the receiver: opens Fetch streams, sends grants, lands rows, reports what happened.

Runs on the asyncio loop; decides nothing. Every fetch ends with exactly one Quiesced or Broken.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import grpc

from chiasm.errors import ChiasmError
from chiasm.plan import Source
from chiasm.rows import RowFormat
from chiasm.tls import PeerTls
from chiasm.transport.base import OpenReceiver, Receiver
from chiasm.v1 import encoder_pb2, encoder_pb2_grpc
from decoder_svc.embeddings.channels import ChannelPool
from decoder_svc.embeddings.events import (
    Broken,
    Cancel,
    Fence,
    Fenced,
    FetchCommand,
    FetchEvent,
    Grant,
    Open,
    Quiesced,
)
from decoder_svc.embeddings.fetch_call import FetchCall

logger = logging.getLogger(__name__)

_FENCE_TIMEOUT_S = 5.0
_FENCE_RETRY_S = (0.1, 5.0)  # first pause, longest pause


class Fetcher:
    """Executes commands. All methods run on the loop's thread.

    Args:
        row_format: What the decoder is built for; said in every FetchOpen.
        open_receiver: Makes the transport's landing half of a fetch.
        post: Gets every event, on the loop's thread.
        on_dropped: Told, at the end of each fetch, how many chunks no grant had asked for.
        gone_s: An encoder whose port has refused connections for so long is dead, and so is its
            writer. (A silent one may be cut off and writing still: it is asked for ever.)
        cancel_s: How long an encoder may take to say Quiesced after Cancel before its stream is
            broken off.
        tls: What encoders are dialled with.
    """

    def __init__(
        self,
        *,
        row_format: RowFormat,
        open_receiver: OpenReceiver,
        post: Callable[[FetchEvent], None],
        on_dropped: Callable[[int], None] = lambda num_chunks: None,
        gone_s: float = 10.0,
        cancel_s: float = 10.0,
        tls: PeerTls | None = None,
    ) -> None:
        self._row_format = row_format
        self._open_receiver = open_receiver
        self._post = post
        self._on_dropped = on_dropped
        self._gone_s = gone_s
        self._cancel_s = cancel_s
        self._channels = ChannelPool(tls=tls)
        self._calls: dict[bytes, FetchCall] = {}
        self._broken: dict[bytes, Receiver] = {}  # whose encoders may still be writing
        self._tasks: set[asyncio.Task[None]] = set()

    def execute(self, commands: Sequence[FetchCommand]) -> None:
        """Starts what the receiver ordered; returns at once."""
        for command in commands:
            match command:
                case Open():
                    receiver = self._open_receiver(command.fetch_id)
                    call = FetchCall(command, receiver, self._row_format, self._post)
                    self._calls[command.fetch_id] = call
                    self._start(self._fetch(call, command.source))
                case Grant() | Cancel():
                    # A call that is over has reported so: the receiver will hear of it.
                    if (known := self._calls.get(command.fetch_id)) is not None:
                        known.send(command)
                        if isinstance(command, Cancel):
                            self._start(self._break_off_late(known))
                case Fence():
                    self._start(self._fence(command))

    @property
    def num_open(self) -> int:
        """Fetch streams that have not ended."""
        return len(self._calls)

    async def close(self) -> None:
        """Breaks every stream off. Fences under way are given up: the memory goes away too."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._channels.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fetch(self, call: FetchCall, source: Source) -> None:
        quiesced = False
        try:
            leased = self._channels.lease(source.endpoint, source.encoder_epoch)
            async with leased as channel:
                quiesced = await call.run(encoder_pb2_grpc.EncoderStub(channel))
        except ChiasmError as error:
            logger.warning(
                "fetch %s for request %s from %s broke: %s",
                call.fetch_id.hex()[:8],
                call.request_id,
                source.endpoint,
                error.message,
            )
        finally:
            # From here on nothing of this task writes into the slab.
            del self._calls[call.fetch_id]
            self._on_dropped(call.num_dropped_chunks)
            if not quiesced and call.receiver.one_sided:
                self._broken[call.fetch_id] = call.receiver
            call.over.set()
            self._post(Quiesced(call.fetch_id) if quiesced else Broken(call.fetch_id))

    async def _break_off_late(self, call: FetchCall) -> None:
        try:
            async with asyncio.timeout(self._cancel_s):
                await call.over.wait()
        except TimeoutError:
            call.break_off()

    async def _fence(self, command: Fence) -> None:
        """Asks until nobody can write for the fetch any more.

        On a stream the only writer is our own task, which has ended before Broken was posted: the
        pages are safe at once, and the encoder is asked once, to let go of the rows. An encoder
        writing into our memory itself (RDMA) must answer, be another life of itself, or be dead;
        then what it may have left in the network is kept out.
        """
        receiver = self._broken.pop(command.fetch_id, None)
        if receiver is None:
            self._post(Fenced(command.fetch_id))
        pause, longest = _FENCE_RETRY_S
        refused_since: float | None = None
        while True:
            try:
                # The answer of another epoch says as much: the process that was writing is gone.
                await self._ask_fence(command)
                break
            except grpc.aio.AioRpcError as error:
                if receiver is None:
                    return
                refused = "refused" in (error.details() or "")
                refused_since = (refused_since or time.monotonic()) if refused else None
                if refused_since is not None and time.monotonic() - refused_since >= self._gone_s:
                    logger.warning("encoder %s is gone", command.endpoint)
                    break
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)
        if receiver is not None:
            await receiver.quiet(aborted=True)
            self._post(Fenced(command.fetch_id))

    async def _ask_fence(self, command: Fence) -> None:
        async with self._channels.lease(command.endpoint, command.epoch) as channel:
            request = encoder_pb2.FenceRequest(
                fetch_id=command.fetch_id, encoder_epoch=command.epoch
            )
            await encoder_pb2_grpc.EncoderStub(channel).Fence(request, timeout=_FENCE_TIMEOUT_S)
