"""Encode and Generate of one request, side by side: one reader, one inbox.

Owns every task and stream of the request; `close` ends them all. Decides nothing about media. What
the decoder says of media is seen to as it comes, whoever is slow; what it says to the client is
made into events when the client takes them.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncIterator

from chiasm import bundles
from chiasm.errors import (
    ChiasmError,
    EmbeddingLost,
    Internal,
    InvalidRequest,
    ResourceExhausted,
    Unavailable,
)
from chiasm.telemetry import GatewayMetrics
from chiasm.v1 import common_pb2, decoder_pb2
from gateway.choices import ChoiceEvent, Choices
from gateway.clients import GenerateStream
from gateway.discovery import Fleet
from gateway.encode_call import Scope
from gateway.encodings import Encodings
from gateway.inbox import Inbox
from gateway.messages import ChoiceDone, Delta, Event, JobDone, Usage
from gateway.order import Order
from gateway.outlet import Outlet
from gateway.routing import Endpoint
from gateway.timeline import Timeline

logger = logging.getLogger(__name__)


class Nudge:
    """Wakes the consumer: the encodings have settled."""


class HalfTold:
    """In place of tokens that something failed at: whatever was done with them is done once."""


TokenDelta = decoder_pb2.TokenDelta
Said = list[ChoiceEvent]
Ending = decoder_pb2.ChoiceFinished | decoder_pb2.GenerateDone | ChiasmError
News = TokenDelta | Said | Ending | Nudge | HalfTold

_HALF_TOLD = HalfTold()


class Flight:
    """One try at a request, on one decoder; it goes on where `choices` are.

    Args:
        order: The planned request.
        decoder: Where to generate.
        choices: Detokenizes; has seen what an earlier flight has brought.
        fleet: Encoders and clients.
        timeline: Deadline and spans.
        metrics: Counts lost embeddings.
        hedge_after_s: See `RoutingConfig`.
    """

    def __init__(
        self,
        order: Order,
        *,
        decoder: Endpoint,
        choices: Choices,
        fleet: Fleet,
        timeline: Timeline,
        metrics: GatewayMetrics,
        hedge_after_s: float = 0.0,
    ) -> None:
        self.decoder_failed = False
        """Whether the error that ended the events was the decoder's and may pass elsewhere."""
        self._order = order
        self._decoder = decoder
        self._choices = choices
        self._fleet = fleet
        self._timeline = timeline
        self._metrics = metrics
        self._gated = not choices.begun  # hold the first event until every item was decoded
        self._inbox: Inbox[News] = Inbox()
        self._charge = fleet.decoders.charge(decoder.address, len(order.token_ids))
        scope = Scope(order.context, fleet, decoder, timeline, metrics, hedge_after_s)
        # No cycle: the media of a request go with it, not with some later collection.
        self._encodings = Encodings(order, scope, listener=weakref.proxy(self))
        self._generate: GenerateStream | None = None
        self._reader: asyncio.Task[None] | None = None

    async def events(self, outlet: Outlet) -> AsyncIterator[Event]:
        """Starts both calls; yields from the first token on, once every item was decoded.

        Args:
            outlet: For deltas that need not be yielded.
        """
        self._inbox.attend(lambda news: self._let_out(news, outlet))
        await self._start()
        held: list[Event] = []
        begun = False
        failure: ChiasmError | None = None
        while failure is None:
            try:
                for news in joined(await self._inbox.take()):
                    said = self._choices.push(news) if isinstance(news, TokenDelta) else news
                    if not isinstance(said, list):
                        held += self._heard(said)
                        continue
                    held += said
                    if len(said) > 1 and isinstance(said[-1], ChoiceDone):
                        await self._stop(said[-1].choice)
            except ChiasmError as error:
                failure = error
            self._gated = self._gated and not self._encodings.settled
            if self._gated or not held:
                continue  # an item may still turn out broken: that is a 400, not half an answer
            if not begun:
                begun = True
                self._timeline.mark("first_token")
            for ready in held:
                yield ready
            if isinstance(held[-1], JobDone):
                return
            held.clear()
        raise failure

    async def close(self) -> None:
        """Cancels whatever still runs, on all services."""
        self._inbox.attend(None)
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            self._reader = None
        await self._encodings.close()
        if self._generate is not None:
            await self._generate.close()
        self._charge.release()

    def encodings_settled(self) -> None:
        """From Encodings: held events may go."""
        self._inbox.put(Nudge())

    def encoding_failed(self, error: ChiasmError) -> None:
        """From Encodings: the request fails."""
        self._inbox.put(error)

    async def encoding_moved(self, move: decoder_pb2.GenerateRequest) -> None:
        """From Encodings: tells the decoder where to fetch now."""
        assert self._generate is not None, "encodings are launched after the decoder is called"
        await self._generate.send(move)

    async def _start(self) -> None:
        order = self._order
        if order.sampling.HasField("grammar") and "grammar" not in self._decoder.features:
            raise InvalidRequest(  # one that does not know the field would not obey it either
                "the decoder cannot hold an answer to a form", param=order.sampling.grammar.param
            )
        promises = await self._encodings.assign()
        try:
            client = self._fleet.decoder(self._decoder.address)
        except Unavailable as error:  # it has just gone
            self._blame(error)
            raise
        self._generate = client.generate(
            timeout_s=self._timeline.remaining_s(),
            bundled=bundles.FEATURE in self._decoder.features,
        )
        self._encodings.launch()
        start = decoder_pb2.GenerateStart(
            context=order.context,
            prompt_token_ids=order.token_ids,
            promises=[promise.to_proto() for promise in promises],
            sampling=order.sampling,
            resume_from=self._choices.resume(),
        )
        # The stream's lock is taken before any encoding runs: `start` is the first message.
        await self._generate.send(decoder_pb2.GenerateRequest(start=start))
        for choice in self._choices.ended:
            await self._stop(choice)
        self._generate.at_once(self._at_once)
        self._reader = asyncio.create_task(self._read(self._generate))
        self._reader.add_done_callback(self._ended)

    async def _read(self, stream: GenerateStream) -> None:
        try:
            async for message in stream:
                if await self._handle(message):
                    self._fleet.decoders.succeeded(self._decoder)
                    return
            raise Unavailable("the decoder ended the stream early")
        except ChiasmError as error:
            self._blame(error)
            self._inbox.put(error)

    def _blame(self, error: ChiasmError) -> None:
        """Rows that could not be had are no fault of the decoder, and a full one is not broken."""
        self.decoder_failed = error.retryable and not isinstance(error, EmbeddingLost)
        if self.decoder_failed and not isinstance(error, ResourceExhausted):
            self._fleet.decoders.failed(self._decoder)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            logger.error("%s failed", self._order.context.request_id, exc_info=task.exception())
            self._inbox.put(Internal("internal error"))

    def _at_once(self, message: decoder_pb2.GenerateResponse) -> bool:
        """What is for the client needs no seeing to here."""
        if message.WhichOneof("kind") != "tokens":
            return False
        self._inbox.put(message.tokens)
        return True

    async def _handle(self, message: decoder_pb2.GenerateResponse) -> bool:
        """Acts on one message; True when it was the last."""
        kind = message.WhichOneof("kind")
        if kind == "accepted" and message.accepted.decoder_epoch != self._decoder.epoch:
            raise Unavailable("another process answers at the decoder's address")
        if kind == "landed":
            await self._encodings.landed(message.landed.item)
        elif kind == "embedding_lost":
            self._metrics.embedding_lost.labels(_cause(message.embedding_lost)).inc()
            await self._encodings.lost(message.embedding_lost)
        elif kind in ("tokens", "finished", "done"):
            self._inbox.put(getattr(message, kind))
        return bool(kind == "done")

    def _let_out(self, news: list[News], outlet: Outlet) -> None:
        """Tokens that came while `events` waits leave at once, up to one that needs it."""
        if self._gated or not outlet.ready():
            return
        if len(news) > 1:
            news[:] = joined(news)
        while news and isinstance(delta := news[0], TokenDelta):
            news[0] = _HALF_TOLD  # what is raised from here on must not be met by a second try
            said = self._choices.push(delta)
            if len(said) > 1:
                news[0] = said  # the decoder is to be told
                return
            if said and isinstance(said[0], Delta):
                outlet.write(said[0])
            del news[0]

    def _heard(self, news: News) -> list[Event]:
        """What the client is told beside tokens."""
        match news:
            case decoder_pb2.ChoiceFinished():
                try:
                    return [*self._choices.finish(news)]
                except Unavailable as error:
                    self._blame(error)
                    raise
            case decoder_pb2.GenerateDone():
                return [self._done(news)]
            case ChiasmError():
                raise news
            case HalfTold():
                logger.error("%s failed in the middle of a delta", self._order.context.request_id)
                raise Internal("internal error")
        return []

    async def _stop(self, choice: int) -> None:
        assert self._generate is not None
        stop = decoder_pb2.StopChoice(choice=choice)
        await self._generate.send(decoder_pb2.GenerateRequest(stop_choice=stop))

    def _done(self, done: decoder_pb2.GenerateDone) -> JobDone:
        for name in ("queue", "transfer", "prefill", "decode"):
            self._timeline.add(name, getattr(done, f"{name}_ms"))
        usage = Usage(
            prompt_tokens=done.prompt_tokens,
            completion_tokens=max(0, done.completion_tokens - self._choices.overrun),
            cached_tokens=done.cached_tokens,
        )
        self._timeline.mark("first_token")
        return JobDone(usage, self._timeline.timings())


def joined(news: list[News]) -> list[News]:
    """Tokens of a choice that follow one another as one: who is behind gets longer pieces."""
    if len(news) == 1:
        return news
    kept = news[:1]
    for one in news[1:]:
        last = kept[-1]
        if not isinstance(one, TokenDelta) or not isinstance(last, TokenDelta):
            kept.append(one)
        elif one.choice == last.choice:
            last.MergeFrom(one)
        else:
            kept.append(one)
    return kept


def _cause(lost: decoder_pb2.EmbeddingLost) -> str:
    return common_pb2.Cause.Name(lost.cause).removeprefix("CAUSE_").lower()
