"""A whole system under pictures and clips: time to first token, rates, what the cache is worth.

    python -m bench.vision --parts pictures,rate,burst,repeats --json vision.json
    python -m bench.vision --tp-size 2 --pp-size 2 --colocated --parts pictures,clip
    python -m bench.vision --small --parts pictures        try it out on a CPU

Qwen2.5-VL-7B's shape with random weights, served by `chiasm up`'s processes on this machine; all
requests come through the gateway as JSON with data URIs. Each part prints one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from bench.served_shape import write_served_shape
from bench.vision_client import Reply, VisionClient, figures
from bench.vision_media import FULL_HD, SQUARE, Album, clip, part, text
from chiasm.cli.machine import Layout, Machine

CLIP_TOKENS, CLIP_ANSWER = 20_906, 39
POPULAR, REPEATED, IN_FLIGHT = 8, 0.8, 64
SMALL_SIZE = (196, 280)


class VisionBench:
    """The parts; each prints what it measures.

    Args:
        client: Of the running system.
        args: Of the command line.
    """

    def __init__(self, client: VisionClient, args: argparse.Namespace) -> None:
        self._client = client
        self._args = args
        self._large = Album(SMALL_SIZE if args.small else FULL_HD)
        self._square = Album(SMALL_SIZE if args.small else SQUARE)
        self._turn = 0

    async def run_pictures(self) -> None:
        """Time to the first token of a question about one to four pictures, one at a time."""
        for count in self._args.pictures:

            def make(count: int = count) -> list[dict[str, Any]]:
                return [*(self._large.fresh() for _ in range(count)), text(64)]

            replies = await self._client.one_by_one(make, count=self._args.repeats, max_tokens=8)
            self._put(f"pictures.{count}", figures(replies))

    async def run_rate(self) -> None:
        """A picture and 128 tokens, 128 more answered, at a steady rate."""
        args = self._args
        replies = await self._client.at_a_rate(
            self._question, rate=args.rate, seconds=args.seconds, max_tokens=args.answer
        )
        self._put("rate", {"rate": args.rate} | figures(replies))

    async def run_burst(self) -> None:
        """The same, all at once."""
        count = self._args.burst
        seconds, replies = await self._client.at_once(
            self._question, count=count, max_tokens=self._args.answer
        )
        self._put("burst", {"requests_s": round(count / seconds, 2)} | figures(replies))

    async def run_repeats(self) -> None:
        """Four of five pictures known, then none, so many in flight. Text goes first and differs:
        no prefix of the decoder is ever found, the encoder's cache alone answers."""
        for name, share in (("unknown", 0.0), ("known", REPEATED)):
            known = self._square.popular(self._args.popular)
            self._turn = 0

            def make(share: float = share, known: list[dict[str, Any]] = known) -> Any:
                self._turn += 1
                shown = known[self._turn % len(known)]
                repeated = (self._turn % 10) < share * 10
                return [text(64), shown if repeated else self._square.fresh(), text(64)]

            seconds = self._args.seconds
            replies = await self._client.in_flight(
                make,
                clients=self._args.in_flight,
                ramp_s=seconds / 3,
                seconds=seconds,
                max_tokens=self._args.answer,
            )
            rate = sum(reply.tokens for reply in replies) / seconds
            self._put(f"repeats.{name}", {"tokens_s": round(rate, 1)} | figures(replies))

    async def run_clip(self) -> None:
        """A chat about a long local clip: all of it, with 39 answered tokens."""
        media, spare = await self._clip_of(self._args.clip_tokens)
        began = time.perf_counter()
        frames = decode_time(media)
        decoding = time.perf_counter() - began
        replies: list[Reply] = []
        for number in range(self._args.repeats + 1):
            other = media + b"\0\0\0\x10free%08d" % number  # a box that is skipped: a new file
            parts = [part(other, "video", "video/mp4"), text(spare)]
            replies.append(await self._client.ask(parts, CLIP_ANSWER))
        found = {"decode_ms": round(decoding * 1e3, 1), "frames": frames, "bytes": len(media)}
        self._put("clip", found | figures(replies[1:]))

    async def _clip_of(self, tokens: int) -> tuple[bytes, int]:
        """The clip whose prompt has that many tokens, with the text that makes up for the rest."""
        counts = []
        for seconds in (4, 8):
            parts = [part(clip(seconds), "video", "video/mp4"), text(1)]
            counts.append((await self._client.ask(parts, 1)).prompt_tokens)
        per_second = (counts[1] - counts[0]) / 4
        seconds = int((tokens - counts[0]) // per_second) + 4
        media = clip(seconds)
        found = await self._client.ask([part(media, "video", "video/mp4"), text(1)], 1)
        return media, tokens - found.prompt_tokens + 1

    def _question(self) -> list[dict[str, Any]]:
        return [self._square.fresh(), text(128)]

    def _put(self, key: str, value: dict[str, Any]) -> None:
        print("RESULT", key, json.dumps(value), flush=True)
        if path := self._args.json:
            known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            path.write_text(json.dumps({**known, key: value}, indent=1), encoding="utf-8")


def decode_time(media: bytes) -> int:
    """Decodes a whole clip with one thread; returns its frames."""
    import io

    import av

    with av.open(io.BytesIO(media)) as container:
        container.streams.video[0].thread_type = "NONE"
        return sum(1 for _ in container.decode(video=0))


def layout_of(args: argparse.Namespace, model: Path) -> Layout:
    """What runs."""
    decoder = f"--load-format {args.load_format} --mem-fraction-static {args.memory} "
    decoder += args.decoder_args
    return Layout(
        model=str(model),
        encoders=args.encoders,
        tp_size=args.tp_size,
        pp_size=args.pp_size,
        mm_enable_dp_encoder=args.colocated,
        port=0,
        drain_s=2.0,
        log_level="warning",
        encoder_args=args.encoder_args,
        decoder_args=decoder,
        gateway_args=args.gateway_args,
    )


async def run(args: argparse.Namespace) -> None:
    """Starts the system and runs the parts asked for."""
    began = time.monotonic()
    directory = Path(args.model or tempfile.mkdtemp())
    if not (directory / "config.json").exists():
        write_served_shape(directory, small=args.small)
    written = time.monotonic()
    try:
        async with Machine(layout_of(args, directory), _relay) as machine:
            url = (await machine.start()).url
            started = time.monotonic()
            print(f"written {written - began:.1f} s, started {started - written:.1f} s", flush=True)
            timeout = aiohttp.ClientTimeout(total=300)
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
                async with session.get(f"{url}/v1/models") as response:
                    name = (await response.json())["data"][0]["id"]
                bench = VisionBench(VisionClient(session, url, name), args)
                for named in args.parts.split(","):
                    part_began = time.monotonic()
                    await getattr(bench, f"run_{named}")()
                    print(f"{named}: {time.monotonic() - part_began:.1f} s", flush=True)
    finally:
        if not args.model:
            shutil.rmtree(directory)


def _relay(name: str, line: str) -> None:
    print(f"{name} | {line}", file=sys.stderr, flush=True)


def _numbers(given: str) -> list[int]:
    return [int(number) for number in given.split(",")]


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.vision", description=__doc__)
    parser.add_argument("--parts", default="pictures,rate,burst,repeats")
    parser.add_argument("--small", action="store_true", help="a model and sizes for a CPU")
    parser.add_argument("--model", help="directory to keep the checkpoint in; made if empty")
    parser.add_argument("--load-format", default="dummy", help="of the language model")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--pp-size", type=int, default=1)
    parser.add_argument("--encoders", type=int, default=1)
    parser.add_argument("--colocated", action="store_true", help="an encoder on each rank's GPU")
    parser.add_argument("--memory", type=float, default=0.6, help="share for the decoder")
    parser.add_argument("--encoder-args", default="")
    parser.add_argument("--decoder-args", default="")
    parser.add_argument("--gateway-args", default="")
    parser.add_argument("--pictures", type=_numbers, default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--rate", type=float, default=8.0)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--burst", type=int, default=128)
    parser.add_argument("--popular", type=int, default=POPULAR)
    parser.add_argument("--in-flight", type=int, default=IN_FLIGHT)
    parser.add_argument("--clip-tokens", type=int, default=CLIP_TOKENS)
    parser.add_argument("--json", type=Path, help="file for the results")
    return parser.parse_args(given)


if __name__ == "__main__":
    asyncio.run(run(arguments()))
