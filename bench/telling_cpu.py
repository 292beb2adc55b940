"""What telling of a step costs the event loop: tokens of the engine on their way to one gateway.

    python -m bench.telling_cpu [--sequences 256] [--profile]

From what the engine hands over to the bytes of one bundle, without the socket. It runs in the
engine's process, so that it waits for the same interpreter.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import logging
import pstats
import statistics
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from chiasm.bundles import BundleServer
from chiasm.telemetry import DecoderMetrics
from chiasm.v1 import common_pb2, decoder_pb2
from decoder_svc.engine.client import EngineClient
from decoder_svc.engine.messages import AddRequest, EngineLoad, StepEvents, StepTokens
from decoder_svc.sampling.params import SamplingParams
from decoder_svc.servicer import DecoderServicer


class AnyRequest:
    """Stands for both checks that a request passes: takes any."""

    def admit(self, start: decoder_pb2.GenerateStart, grammar: str) -> AddRequest:
        """As `Intake` does."""
        name = start.context.request_id
        return AddRequest(
            request_id=name, prompt_ids=(1,), sampling=SamplingParams(max_tokens=1 << 20)
        )

    async def check(self, grammar: decoder_pb2.Grammar) -> str:
        """As `GrammarCheck` does."""
        return ""


class Told:
    """A servicer with so many calls open on one stream.

    Args:
        sequences: Calls.
    """

    def __init__(self, sequences: int) -> None:
        self.client = EngineClient(max_waiting=2 * sequences, metrics=DecoderMetrics())
        servicer = DecoderServicer(
            intake=AnyRequest(),  # type: ignore[arg-type]
            grammars=AnyRequest(),  # type: ignore[arg-type]
            client=self.client,
            description=common_pb2.Description(),
            slab_page_bytes=1,
            slab_pages=1,
        )
        parse = decoder_pb2.GenerateRequest.FromString
        server = BundleServer(servicer.Generate, parse, method="GenerateMany")
        self._names = tuple(f"request-{index:032}" for index in range(sequences))
        self._position = 0
        self._bundles: AsyncGenerator[common_pb2.Bundle, None] = server.serve(self._calls())

    async def _calls(self) -> AsyncIterator[common_pb2.Bundle]:
        bundle = common_pb2.Bundle()
        for index, name in enumerate(self._names):
            start = decoder_pb2.GenerateStart(context=common_pb2.RequestContext(request_id=name))
            message = decoder_pb2.GenerateRequest(start=start).SerializeToString()
            bundle.strands.add(call=index + 1, message=message)
        yield bundle
        await asyncio.Event().wait()

    async def hear(self) -> int:
        """Waits until every call has been told something. Returns the bytes that it took."""
        count = size = 0
        while count < len(self._names):
            bundle = await anext(self._bundles)
            count += len(bundle.strands)
            size += len(bundle.SerializeToString())
        return size

    async def step(self) -> int:
        """The engine has drawn a token for each."""
        count = len(self._names)
        tokens = StepTokens(
            self._names, (0,) * count, (self._position,) * count, tuple(range(5000, 5000 + count))
        )
        self._position += 1
        self.client.mailbox.send(StepEvents((tokens,)), (), EngineLoad(running=count))
        return await self.hear()

    async def close(self) -> None:
        """Ends all calls."""
        await self._bundles.aclose()


async def measure(args: argparse.Namespace) -> None:
    """Prints microseconds of CPU a step, and with --profile where they go."""
    told = Told(args.sequences)
    await told.hear()
    for _ in range(20):
        await told.step()
    spent: list[float] = []
    for _ in range(args.steps):
        begin = time.thread_time()
        size = await told.step()
        spent.append((time.thread_time() - begin) * 1e6)
    print(
        f"{args.sequences} calls, {size} bytes: {statistics.mean(spent):.0f} us of CPU a step, "
        f"median {statistics.median(spent):.0f}"
    )
    if args.profile:
        profile: Any = cProfile.Profile()
        profile.enable()
        for _ in range(args.steps):
            await told.step()
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    await told.close()


def main() -> None:
    """Measures once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--profile", action="store_true")
    logging.disable(logging.CRITICAL)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
