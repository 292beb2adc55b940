"""A decoder without a model: it keeps the contract of decoder.proto and "generates" a script."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc

from chiasm.bundles import FEATURE, BundleServer
from chiasm.errors import ChiasmError, InvalidRequest, Unavailable
from chiasm.handshake import CONTRACT
from chiasm.plan import Cause
from chiasm.v1 import common_pb2, decoder_pb2, decoder_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True)
class Script:
    """What the fake does; may be changed while it serves.

    Args:
        token_ids: Output of every choice, cut at max_tokens.
        per_choice: Output of single choices, by index, instead.
        stop_token_id: Ends each choice with STOP and this id; None ends with LENGTH.
        land_s: Seconds until each item is reported landed.
        land_when: Awaited before the first word of an item, lost or landed, with its promise;
            None = at once.
        landed_when: Awaited before an item is reported landed, with its promise; None = at once.
        token_s: Seconds before each step.
        step_when: Awaited before each step, with its number; None = at once.
        lose: Causes reported for item 0, part 0, one per attempt, before it lands.
        refuse: Raised instead of accepting.
        die_after: The rpc fails UNAVAILABLE once so many steps were sent; None never.
    """

    token_ids: tuple[int, ...] = (1, 2, 3)
    per_choice: dict[int, tuple[int, ...]] = field(default_factory=dict)
    stop_token_id: int | None = 0
    land_s: float = 0.0
    land_when: Callable[[decoder_pb2.Promise], Awaitable[None]] | None = None
    landed_when: Callable[[decoder_pb2.Promise], Awaitable[None]] | None = None
    token_s: float = 0.0
    step_when: Callable[[int], Awaitable[None]] | None = None
    lose: tuple[Cause, ...] = ()
    refuse: ChiasmError | None = None
    die_after: int | None = None


@dataclass(slots=True)
class Generation:
    """One Generate rpc as the fake saw it."""

    start: decoder_pb2.GenerateStart
    redirects: list[decoder_pb2.Redirect] = field(default_factory=list)
    added: list[decoder_pb2.AddSource] = field(default_factory=list)
    stopped: set[int] = field(default_factory=set)
    half_closed: bool = False
    ended: bool = False  # the rpc is over, for whatever reason
    news: asyncio.Condition = field(default_factory=asyncio.Condition)


class FakeDecoder(decoder_pb2_grpc.DecoderServicer):
    """Serves Generate, Describe and WatchLoad.

    Args:
        script: What it generates and what goes wrong.
        description: What Describe answers; role, contract and epoch are filled in.
        bundled: Whether it says that it takes many calls on one stream.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        description: common_pb2.Description | None = None,
        bundled: bool = True,
    ) -> None:
        self.bundled = bundled
        self.script = script or Script()
        self.epoch = secrets.randbits(63) | 1
        self.description = description or common_pb2.Description()
        self.load = common_pb2.Load()
        self.generations: list[Generation] = []

    @property
    def running(self) -> int:
        """Generate rpcs that have not ended."""
        return sum(not g.ended for g in self.generations)

    async def Generate(
        self, requests: AsyncIterator[decoder_pb2.GenerateRequest], context: Context
    ) -> AsyncIterator[decoder_pb2.GenerateResponse]:
        """Accepted, losses and landings as scripted, then token ids step by step."""
        first = await anext(aiter(requests))
        if not first.HasField("start"):
            raise InvalidRequest("the first message must be a start")
        if self.script.refuse is not None:
            raise self.script.refuse
        generation = Generation(first.start)
        self.generations.append(generation)
        reader = asyncio.create_task(_listen(requests, generation))
        try:
            yield decoder_pb2.GenerateResponse(
                accepted=decoder_pb2.GenerateAccepted(decoder_epoch=self.epoch)
            )
            async for response in self._land(generation):
                yield response
            async for response in self._decode(generation):
                yield response
        finally:
            generation.ended = True
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader

    async def GenerateMany(
        self, requests: AsyncIterator[common_pb2.Bundle], context: Context
    ) -> AsyncIterator[common_pb2.Bundle]:
        """Many of them on one stream."""
        parse = decoder_pb2.GenerateRequest.FromString
        server = BundleServer(self.Generate, parse, method="GenerateMany")
        async with aclosing(server.serve(requests)) as bundles:
            async for bundle in bundles:
                yield bundle

    async def Describe(
        self, request: common_pb2.DescribeRequest, context: Context
    ) -> common_pb2.Description:
        """The description given, with role, contract and epoch filled in."""
        answer = common_pb2.Description()
        answer.CopyFrom(self.description)
        answer.contract.CopyFrom(CONTRACT)
        answer.role = "decoder"
        answer.features.extend([FEATURE] if self.bundled else [])
        answer.epoch = self.epoch
        return answer

    async def WatchLoad(
        self, request: common_pb2.WatchLoadRequest, context: Context
    ) -> AsyncIterator[common_pb2.Load]:
        """The load as set by the test, again and again."""
        while True:
            yield self.load
            await asyncio.sleep(max(request.interval_ms, 10) / 1000)

    async def _land(self, generation: Generation) -> AsyncIterator[decoder_pb2.GenerateResponse]:
        for promise in generation.start.promises:
            attempt = promise.parts[0].attempt
            if self.script.land_when is not None:
                await self.script.land_when(promise)
            for cause in self.script.lose if promise.item == 0 else ():
                yield decoder_pb2.GenerateResponse(
                    embedding_lost=decoder_pb2.EmbeddingLost(
                        item=0, part=0, attempt=attempt, cause=cause.to_proto(), message="scripted"
                    )
                )
                attempt = await _redirected(generation, attempt)
            if self.script.landed_when is not None:
                await self.script.landed_when(promise)
            await asyncio.sleep(self.script.land_s)
            yield decoder_pb2.GenerateResponse(landed=decoder_pb2.Landed(item=promise.item))

    async def _decode(self, generation: Generation) -> AsyncIterator[decoder_pb2.GenerateResponse]:
        start = generation.start
        budget = start.sampling.max_tokens or 16
        sent = {r.choice: len(r.output_ids) for r in start.resume_from}
        outputs = {
            choice: self.script.per_choice.get(choice, self.script.token_ids)[:budget]
            for choice in range(max(1, start.sampling.n))
        }
        open_choices = dict(outputs)
        for step in range(budget + 1):
            if step == self.script.die_after:
                raise Unavailable("made to die")
            await self._step(step)
            for choice, ids in tuple(open_choices.items()):
                if choice in generation.stopped or step >= len(ids):
                    finished = self._finished(choice, whole=len(ids) < budget)
                    if choice in generation.stopped:  # it was told to stop: no token did
                        finished.finished.ClearField("stop_token_id")
                    yield finished
                    del open_choices[choice]
                elif step >= sent.get(choice, 0):
                    yield decoder_pb2.GenerateResponse(
                        tokens=decoder_pb2.TokenDelta(
                            choice=choice, position=step, token_ids=[ids[step]]
                        )
                    )
            if not open_choices:
                break
        yield decoder_pb2.GenerateResponse(
            done=decoder_pb2.GenerateDone(
                prompt_tokens=len(start.prompt_token_ids),
                completion_tokens=sum(len(ids) for ids in outputs.values()),
            )
        )

    async def _step(self, step: int) -> None:
        """As an engine's, one step is everybody's: all wake at the same multiples of `token_s`."""
        if self.script.step_when is not None:
            await self.script.step_when(step)
        token_s = self.script.token_s
        left_s = token_s - asyncio.get_running_loop().time() % token_s if token_s else 0.0
        await asyncio.sleep(left_s)

    def _finished(self, choice: int, *, whole: bool) -> decoder_pb2.GenerateResponse:
        """STOP when the script ended before the budget did, LENGTH otherwise."""
        stop = self.script.stop_token_id if whole else None
        reason = (
            decoder_pb2.FINISH_REASON_LENGTH if stop is None else decoder_pb2.FINISH_REASON_STOP
        )
        return decoder_pb2.GenerateResponse(
            finished=decoder_pb2.ChoiceFinished(
                choice=choice,
                reason=reason,
                stop_token_id=stop,
            )
        )


async def _listen(
    requests: AsyncIterator[decoder_pb2.GenerateRequest], generation: Generation
) -> None:
    async for request in requests:
        async with generation.news:
            match request.WhichOneof("kind"):
                case "redirect":
                    generation.redirects.append(request.redirect)
                case "add_source":
                    generation.added.append(request.add_source)
                case "stop_choice":
                    generation.stopped.add(request.stop_choice.choice)
            generation.news.notify_all()
    generation.half_closed = True


async def _redirected(generation: Generation, attempt: int) -> int:
    """Waits for a Redirect of a newer attempt than the lost one; returns it."""

    def newer() -> list[int]:
        return [r.attempt for r in generation.redirects if r.attempt > attempt]

    async with generation.news:
        await generation.news.wait_for(newer)
    return max(newer())
