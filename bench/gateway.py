"""What the gateway costs: CPU time of its own processes, and milliseconds added, with fakes behind.

Gateway, fakes and load share this machine; only the gateway's processes are counted. Beside it, in
the same run, LiteLLM's proxy in front of a fake OpenAI server does the same job, if `--litellm`
names the Python of an environment that has `litellm[proxy]`. Run as `python -m bench.gateway`.
Exit code 1: a bar was missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import os
import shlex
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, fields
from pathlib import Path

import aiohttp

from bench import cores
from bench.gateway_load import Answered, DirectJob, HttpJob, body, closed_loop, pictures
from chiasm.channel import connect
from chiasm.process import DidNotStart, Spec, Supervisor

CPU_MS = 2.0  # a request with a 1 MB picture
ADDED_MS = 3.0  # to its p50
TOKEN_US = 30.0  # of CPU, a streamed token
PROXY_RATIO = 5.0  # LiteLLM's CPU over ours
RESULTS = Path(__file__).with_name("RESULTS-gateway.md")
SAME_JOB_TOKENS = 16
KEY = "sk-9f2c1d7e5b8a4630b1c2d3e4f5a69788"  # LiteLLM wants one that is not weak
FEW, MANY = 16, 272
CALM, ENGINE, AT_ONCE = "gateway", "gateway of an engine", "gateway at once"
ENGINE_STREAMS, ENGINE_STEP_S = 256, 0.008  # a decoder with full batches: 32,000 tokens/s


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.gateway", description=__doc__)
    parser.add_argument("--requests", type=int, default=400, help="with a picture, a round")
    parser.add_argument("--streams", type=int, default=128, help="of text, a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--token-s", type=float, default=0.005, help="between tokens of a stream")
    parser.add_argument("--gateway-flags", default="")
    parser.add_argument("--litellm", default="", help="Python of an environment that has it")
    parser.add_argument("--no-write", action="store_true", help="do not append to the results")
    return parser.parse_args()


@dataclass(frozen=True, slots=True)
class Behind:
    """A gateway and the fakes it has to itself."""

    gateway: str
    encoder: str
    decoder: str


@dataclass(frozen=True, slots=True)
class Servers:
    """What runs, and where."""

    supervisor: Supervisor
    gateways: dict[str, Behind]
    proxy: str

    def url(self, name: str) -> str:
        """Of a gateway's chat endpoint."""
        return f"http://{self.gateways[name].gateway}/v1/chat/completions"

    def cpu_s(self, name: str) -> float:
        """CPU seconds of one of them and its children so far."""
        pid = self.supervisor.pids()[name]
        return sum(map(cores.process_s, (pid, *cores.children(pid))))


@contextlib.asynccontextmanager
async def servers(args: argparse.Namespace) -> AsyncIterator[Servers]:
    """A gateway for each pace, with its fakes, and, if asked for, the proxy."""
    supervisor = Supervisor(_say, stop_s=5.0)
    paces = {CALM: args.token_s, ENGINE: ENGINE_STEP_S, AT_ONCE: 0.0}
    try:
        gateways = {
            name: await _launch_gateway(supervisor, name, token_s, args.gateway_flags)
            for name, token_s in paces.items()
        }
        proxy = ""
        if args.litellm:
            openai = await _launch(supervisor, "openai", _fake("openai", args.token_s))
            proxy = await _launch_litellm(supervisor, args.litellm, openai)
        for behind in gateways.values():
            await _until_ready(f"http://{behind.gateway}/ready")
        yield Servers(supervisor, gateways, proxy)
    finally:
        await supervisor.stop()


@dataclass(slots=True)
class Findings:
    """One value a round."""

    picture_ms: list[float]
    text_ms: list[float]
    token_us: list[float]
    engine_token_us: list[float]
    engine_rate: list[float]  # tokens/s
    gateway_p50_ms: list[float]
    direct_p50_ms: list[float]
    ours_ms: list[float]
    proxy_ms: list[float]
    calibration_ms: list[float]


async def measure(args: argparse.Namespace, at: Servers) -> Findings:
    """All rounds."""
    found = Findings(*([] for _ in fields(Findings)))
    media = pictures(16)
    calm, at_once = at.url(CALM), at.url(AT_ONCE)
    services = at.gateways[AT_ONCE]
    whole = [body(one, tokens=1, stream=False) for one in media]
    same = [body(one, tokens=SAME_JOB_TOKENS, stream=True) for one in media]
    few, many = ([body(None, tokens=n, stream=True)] for n in (FEW, MANY))
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        connect(services.encoder) as encoder,
        connect(services.decoder) as decoder,
    ):

        async def cpu(
            name: str, target: str, bodies: list[bytes], count: int, clients: int
        ) -> float:
            """CPU milliseconds of `name`, a request."""
            job = HttpJob(session, target, bodies, key=KEY)
            before = at.cpu_s(name)
            await closed_loop(job, clients=clients, requests=count)
            return (at.cpu_s(name) - before) * 1e3 / count

        async def per_token(name: str, streams: int, count: int) -> tuple[float, float]:
            """CPU microseconds of a token, and milliseconds of a request of few of them."""
            cost_few = await cpu(name, at.url(name), few, count, streams)
            cost_many = await cpu(name, at.url(name), many, count, streams)
            return (cost_many - cost_few) * 1e3 / (MANY - FEW), cost_few

        direct = DirectJob(encoder, decoder, media, 1, services.encoder)
        for name in at.gateways:  # warm up
            await cpu(name, at.url(name), whole, 40, args.clients)
        await closed_loop(direct, clients=1, requests=20)
        for number in range(args.rounds):
            found.calibration_ms.append(cores.calibrate_ms())
            found.picture_ms.append(await cpu(CALM, calm, whole, args.requests, args.clients))
            token_us, text_ms = await per_token(CALM, 32, args.streams)
            found.token_us.append(token_us)
            found.text_ms.append(text_ms)
            began = time.monotonic()
            token_us, _ = await per_token(ENGINE, ENGINE_STREAMS, 2 * ENGINE_STREAMS)
            seconds = time.monotonic() - began
            found.engine_token_us.append(token_us)
            found.engine_rate.append(2 * ENGINE_STREAMS * (FEW + MANY) / seconds)
            alone = await closed_loop(HttpJob(session, at_once, whole), clients=1, requests=100)
            found.gateway_p50_ms.append(_p50_ms(alone))
            found.direct_p50_ms.append(_p50_ms(await closed_loop(direct, clients=1, requests=100)))
            if at.proxy:
                other = f"http://{at.proxy}/v1/chat/completions"
                count = args.requests // 4
                found.ours_ms.append(await cpu(CALM, calm, same, count, args.clients))
                found.proxy_ms.append(await cpu("litellm", other, same, count, args.clients))
            print(f"round {number + 1}: {_line(found)}", flush=True)
    return found


def table(found: Findings) -> tuple[str, bool]:
    """Markdown, and whether every bar is met."""
    added = [a - b for a, b in zip(found.gateway_p50_ms, found.direct_p50_ms, strict=True)]
    rows = [
        ("CPU of a request with a 1 MB picture, ms", found.picture_ms, CPU_MS),
        ("added to its p50 (gateway less direct calls), ms", added, ADDED_MS),
        (f"CPU of a streamed token, us: {_ENGINE_LOAD}", found.engine_token_us, TOKEN_US),
        ("the same with 32 streams and steps of 5 ms", found.token_us, TOKEN_US),
    ]
    lines = ["| what | measured (each round) | bar | met |", "|---|---|---|---|"]
    good = True
    for what, values, bar in rows:
        met = statistics.median(values) <= bar
        good &= met
        lines.append(f"| {what} | {_values(values)} | <= {bar:g} | {'yes' if met else 'no'} |")
    rate = _values(found.engine_rate)
    lines.append(f"| tokens/s with {ENGINE_STREAMS} streams, begin and end included | {rate} | | |")
    lines.append(f"| CPU of a text request of {FEW} tokens, ms | {_values(found.text_ms)} | | |")
    pace = _values(found.calibration_ms)
    lines.append(f"| CPU of 500,000 turns of an empty loop of Python, ms | {pace} | | |")
    if found.proxy_ms:
        ratio = [b / a for a, b in zip(found.ours_ms, found.proxy_ms, strict=True)]
        met = statistics.median(ratio) >= PROXY_RATIO
        good &= met
        what = f"LiteLLM's CPU over ours, 1 MB picture and {SAME_JOB_TOKENS} streamed tokens"
        lines.append(f"| {what} | {_values(ratio)} | >= {PROXY_RATIO:g} | {_yes(met)} |")
        lines.append(f"| of these, ours, ms | {_values(found.ours_ms)} | | |")
        lines.append(f"| of these, LiteLLM's, ms | {_values(found.proxy_ms)} | | |")
    return "\n".join(lines), good


def main() -> None:
    """Measures, prints, writes down, judges."""
    args = options()

    async def run() -> Findings:
        async with servers(args) as at:
            return await measure(args, at)

    try:
        found = asyncio.run(run())
    except DidNotStart as error:
        sys.exit(f"bench: {error}")
    text, good = table(found)
    print(text)
    if not args.no_write:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
        command = f"python -m bench.gateway --rounds {args.rounds} --requests {args.requests}"
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(f"\n## {now}\n\n`{command}`, {cores.describe()}\n\n{text}\n")
    sys.exit(0 if good else 1)


async def _launch_gateway(
    supervisor: Supervisor, name: str, token_s: float, more_flags: str
) -> Behind:
    """Its fakes make a token of every stream each `token_s`."""
    services = Spec(f"services of {name}", _fake("services", token_s))
    fakes = await supervisor.launch(services)
    flags = ["--model", "demo", "--port", "0", "--log-level", "warning"]
    flags += ["--encoder-urls", fakes["encoder"], "--decoder-urls", fakes["decoder"]]
    command = (sys.executable, "-m", "gateway", *flags, *shlex.split(more_flags))
    address = await _launch(supervisor, name, command)
    return Behind(address, fakes["encoder"], fakes["decoder"])


def _fake(role: str, token_s: float) -> tuple[str, ...]:
    return (sys.executable, "-m", "bench.fake_peers", role, "--token-s", str(token_s))


async def _launch(supervisor: Supervisor, name: str, command: tuple[str, ...]) -> str:
    return (await supervisor.launch(Spec(name, command)))["address"]


async def _launch_litellm(supervisor: Supervisor, python: str, backend: str) -> str:
    """LiteLLM's proxy as its documentation starts it, one worker, without a database."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = Path(tempfile.mkdtemp()) / "litellm.yaml"
    config.write_text(
        "model_list:\n- model_name: demo\n  litellm_params:\n    model: openai/demo\n"
        f"    api_base: http://{backend}/v1\n    api_key: sk-none\n"
        f"general_settings:\n  master_key: {KEY}\nlitellm_settings:\n  telemetry: false\n"
    )
    command = (
        str(Path(python).with_name("litellm")),
        *("--config", str(config), "--host", "127.0.0.1", "--port", str(port)),
    )
    shell = f"env -u PYTHONPATH {shlex.join(command)} & pid=$!; trap 'kill $pid' TERM; "
    shell += (
        f"until {sys.executable} -c {shlex.quote(_KNOCK.format(port=port))}; do sleep 1; done; "
    )
    shell += f"echo chiasm-ready role=litellm address=127.0.0.1:{port}; wait $pid"
    return await _launch(supervisor, "litellm", ("bash", "-c", shell))


_ENGINE_LOAD = f"{ENGINE_STREAMS} streams, steps of {ENGINE_STEP_S * 1e3:g} ms"

_KNOCK = (
    "import urllib.request; "
    "urllib.request.urlopen('http://127.0.0.1:{port}/health/liveliness', timeout=2)"
)


async def _until_ready(url: str) -> None:
    async with aiohttp.ClientSession() as session, asyncio.timeout(30):
        while True:
            async with session.get(url) as answer:
                if answer.status == 200 and (await answer.json())["images"]:
                    return
            await asyncio.sleep(0.1)


def _say(name: str, line: str) -> None:
    if not line.startswith("chiasm-ready") and os.environ.get("BENCH_VERBOSE"):
        print(f"{name}: {line}", flush=True)


def _p50_ms(answered: Answered) -> float:
    return statistics.median(answered.whole_s) * 1e3


def _line(found: Findings) -> str:
    return (
        f"picture {found.picture_ms[-1]:.2f} ms, text {found.text_ms[-1]:.2f} ms, "
        f"token {found.engine_token_us[-1]:.1f} us ({found.engine_rate[-1]:.0f}/s), "
        f"calm {found.token_us[-1]:.1f} us, p50 {found.gateway_p50_ms[-1]:.2f} ms, "
        f"direct {found.direct_p50_ms[-1]:.2f} ms"
        + (
            f", ours {found.ours_ms[-1]:.2f}, litellm {found.proxy_ms[-1]:.2f} ms"
            if found.proxy_ms
            else ""
        )
    )


def _values(values: list[float]) -> str:
    each = ", ".join(f"{value:.2f}" for value in values)
    return f"{statistics.median(values):.2f} ({each})"


def _yes(met: bool) -> str:
    return "yes" if met else "no"


if __name__ == "__main__":
    main()
