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
from collections.abc import AsyncIterator
from dataclasses import dataclass
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
class Servers:
    """What runs, and where."""

    supervisor: Supervisor
    gateway: str
    encoder: str
    decoder: str
    proxy: str

    def cpu_s(self, name: str) -> float:
        """CPU seconds of one of them and its children so far."""
        pid = self.supervisor.pids()[name]
        return sum(map(cores.process_s, (pid, *cores.children(pid))))


@contextlib.asynccontextmanager
async def servers(args: argparse.Namespace) -> AsyncIterator[Servers]:
    """Fakes, gateway and, if asked for, the proxy."""
    supervisor = Supervisor(_say, stop_s=5.0)
    fake = (sys.executable, "-m", "bench.fake_peers")
    try:
        pause = ("--token-s", str(args.token_s))
        fakes = await supervisor.launch(Spec("services", (*fake, "services", *pause)))
        encoder, decoder = fakes["encoder"], fakes["decoder"]
        flags = ["--model", "demo", "--port", "0", "--log-level", "warning"]
        flags += ["--encoder-urls", encoder, "--decoder-urls", decoder]
        flags += shlex.split(args.gateway_flags)
        command = (sys.executable, "-m", "gateway", *flags)
        gateway = await _launch(supervisor, "gateway", command)
        proxy = ""
        if args.litellm:
            openai = await _launch(supervisor, "openai", (*fake, "openai", *pause))
            proxy = await _launch_litellm(supervisor, args.litellm, openai)
        await _until_ready(f"http://{gateway}/ready")
        yield Servers(supervisor, gateway, encoder, decoder, proxy)
    finally:
        await supervisor.stop()


@dataclass(slots=True)
class Findings:
    """One value a round."""

    picture_ms: list[float]
    text_ms: list[float]
    token_us: list[float]
    gateway_p50_ms: list[float]
    direct_p50_ms: list[float]
    ours_ms: list[float]
    proxy_ms: list[float]
    calibration_ms: list[float]


async def measure(args: argparse.Namespace, at: Servers) -> Findings:
    """All rounds."""
    found = Findings([], [], [], [], [], [], [], [])
    media = pictures(16)
    url = f"http://{at.gateway}/v1/chat/completions"
    whole = [body(one, tokens=1, stream=False) for one in media]
    same = [body(one, tokens=SAME_JOB_TOKENS, stream=True) for one in media]
    few, many = ([body(None, tokens=n, stream=True)] for n in (FEW, MANY))
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        connect(at.encoder) as encoder,
        connect(at.decoder) as decoder,
    ):

        async def cpu(
            name: str, target: str, bodies: list[bytes], count: int, clients: int
        ) -> float:
            """CPU milliseconds of `name`, a request."""
            job = HttpJob(session, target, bodies, key=KEY)
            before = at.cpu_s(name)
            await closed_loop(job, clients=clients, requests=count)
            return (at.cpu_s(name) - before) * 1e3 / count

        direct = DirectJob(encoder, decoder, media, 1, at.encoder)
        await cpu("gateway", url, whole, 40, args.clients)  # warm up
        await closed_loop(direct, clients=1, requests=20)
        for number in range(args.rounds):
            found.calibration_ms.append(cores.calibrate_ms())
            found.picture_ms.append(await cpu("gateway", url, whole, args.requests, args.clients))
            cost_few = await cpu("gateway", url, few, args.streams, 32)
            cost_many = await cpu("gateway", url, many, args.streams, 32)
            found.text_ms.append(cost_few)
            found.token_us.append((cost_many - cost_few) * 1e3 / (MANY - FEW))
            alone = await closed_loop(HttpJob(session, url, whole), clients=1, requests=100)
            found.gateway_p50_ms.append(_p50_ms(alone))
            found.direct_p50_ms.append(_p50_ms(await closed_loop(direct, clients=1, requests=100)))
            if at.proxy:
                other = f"http://{at.proxy}/v1/chat/completions"
                count = args.requests // 4
                found.ours_ms.append(await cpu("gateway", url, same, count, args.clients))
                found.proxy_ms.append(await cpu("litellm", other, same, count, args.clients))
            print(f"round {number + 1}: {_line(found)}", flush=True)
    return found


def table(found: Findings) -> tuple[str, bool]:
    """Markdown, and whether every bar is met."""
    added = [a - b for a, b in zip(found.gateway_p50_ms, found.direct_p50_ms, strict=True)]
    rows = [
        ("CPU of a request with a 1 MB picture, ms", found.picture_ms, CPU_MS),
        ("added to its p50 (gateway less direct calls), ms", added, ADDED_MS),
        ("CPU of a streamed token, us", found.token_us, TOKEN_US),
    ]
    lines = ["| what | measured (each round) | bar | met |", "|---|---|---|---|"]
    good = True
    for what, values, bar in rows:
        met = statistics.median(values) <= bar
        good &= met
        lines.append(f"| {what} | {_values(values)} | <= {bar:g} | {'yes' if met else 'no'} |")
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
        f"token {found.token_us[-1]:.1f} us, p50 {found.gateway_p50_ms[-1]:.2f} ms, "
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
