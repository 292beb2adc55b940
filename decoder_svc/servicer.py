"""The decoder's rpcs: Generate, alone or many on one stream, joins a caller to the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import grpc

from chiasm.bundles import BundledCall, BundleServer
from chiasm.errors import ChiasmError, InvalidRequest
from chiasm.server import load_interval_s
from chiasm.v1 import common_pb2, decoder_pb2, decoder_pb2_grpc
from decoder_svc.engine.client import EngineClient, EventStream
from decoder_svc.engine.messages import AbortRequest, RequestFailed
from decoder_svc.grammar_check import GrammarCheck
from decoder_svc.intake import Intake
from decoder_svc.wire import TokenWriter, to_command, to_response

SERVICE_NAME = "chiasm.v1.Decoder"

Context = grpc.aio.ServicerContext[decoder_pb2.GenerateRequest, decoder_pb2.GenerateResponse]
BundleContext = grpc.aio.ServicerContext[common_pb2.Bundle, common_pb2.Bundle]


class DecoderServicer(decoder_pb2_grpc.DecoderServicer):
    """Translates; the engine decides.

    Args:
        intake: Checks requests.
        grammars: Checks what their answers are to look like.
        client: The engine.
        description: What Describe says.
        slab_page_bytes: Bytes of one page of the slab.
        slab_pages: Pages of the slab.
    """

    def __init__(
        self,
        *,
        intake: Intake,
        grammars: GrammarCheck,
        client: EngineClient,
        description: common_pb2.Description,
        slab_page_bytes: int,
        slab_pages: int,
    ) -> None:
        self._intake = intake
        self._grammars = grammars
        self._client = client
        self._description = description
        self._page_bytes = slab_page_bytes
        self._pages = slab_pages
        self._writer = TokenWriter()

    async def Generate(
        self, request_iterator: AsyncIterator[decoder_pb2.GenerateRequest], context: Context
    ) -> AsyncIterator[decoder_pb2.GenerateResponse]:
        """Ends with the request; ends the request when the caller goes."""
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("kind") != "start":
            raise InvalidRequest("the first message must be start", param="kind")
        grammar = await self._grammars.check(first.start.sampling.grammar)
        stream = self._client.open(self._intake.admit(first.start, grammar))
        # Also covers a caller that goes while this generator is suspended in `yield`.
        context.add_done_callback(lambda *_: stream.close())  # type: ignore[arg-type]
        stream.shortcut = self._shortcut(context)
        listening = asyncio.create_task(self._listen(request_iterator, stream))
        try:
            accepted = decoder_pb2.GenerateAccepted(decoder_epoch=self._epoch)
            yield decoder_pb2.GenerateResponse(accepted=accepted)
            done = False
            while not done:
                for event in await stream.next():
                    response = to_response(event)
                    yield response
                    done = response.HasField("done")
        finally:
            listening.cancel()
            stream.close()

    async def GenerateMany(
        self, request_iterator: AsyncIterator[common_pb2.Bundle], context: BundleContext
    ) -> AsyncIterator[common_pb2.Bundle]:
        """Many Generates of one gateway."""
        parse = decoder_pb2.GenerateRequest.FromString
        server = BundleServer(self.Generate, parse, method="GenerateMany")
        async with aclosing(server.serve(request_iterator)) as bundles:
            async for bundle in bundles:
                yield bundle

    def _shortcut(self, call: object) -> Callable[[int, int, int], bool] | None:
        """See `EventStream`: calls of a bundle are told of a step without a turn of each."""
        if not isinstance(call, BundledCall):
            return None
        write, write_now = self._writer.write, call.write_now
        return lambda choice, position, token_id: write_now(write(choice, position, token_id))

    async def _listen(
        self, messages: AsyncIterator[decoder_pb2.GenerateRequest], stream: EventStream
    ) -> None:
        """Passes on what the gateway says later; half-closing means nothing."""
        try:
            async for message in messages:
                self._client.tell(to_command(stream.request_id, message))
        except ChiasmError as error:
            self._client.tell(AbortRequest(stream.request_id))
            stream.put(RequestFailed(error))

    async def Describe(
        self, request: common_pb2.DescribeRequest, context: Context
    ) -> common_pb2.Description:
        """Who this decoder is and what it takes."""
        description = common_pb2.Description()
        description.CopyFrom(self._description)
        description.epoch = self._epoch
        return description

    async def WatchLoad(
        self, request: common_pb2.WatchLoadRequest, context: Context
    ) -> AsyncIterator[common_pb2.Load]:
        """One line per interval until the caller goes, or this has become another decoder."""
        losses = self._client.load.num_losses
        while not (self._client.load.available and self._client.load.num_losses > losses):
            yield self._load()
            await asyncio.sleep(load_interval_s(request))

    @property
    def _epoch(self) -> int:
        """One that has lost its ranks has lost its cache too: it is another decoder."""
        return self._description.epoch + self._client.load.num_losses

    def _load(self) -> common_pb2.Load:
        load = self._client.load
        return common_pb2.Load(
            running=load.running,
            waiting=max(0, self._client.num_waiting),
            embedding_bytes_free=load.slab_pages_free * self._page_bytes,
            embedding_bytes_total=self._pages * self._page_bytes,
            waiting_tokens=load.waiting_tokens,
            kv_usage_ratio=load.kv_usage_ratio,
            draining=self._client.draining or not load.available,
            stalled=not load.available,
        )
