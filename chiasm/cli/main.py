"""The console script `chiasm`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

from chiasm import __version__
from chiasm.cli.bench import Load, run_bench
from chiasm.cli.check import run_check
from chiasm.cli.client import DEFAULT_URL, Client, Tls, user_message
from chiasm.cli.demo import run_demo
from chiasm.cli.failure import CommandFailed
from chiasm.cli.machine import Layout
from chiasm.cli.model_facts import Ranks, Traffic
from chiasm.cli.up import serve_machine

SERVICES = {"encoder": "encoder_svc", "decoder": "decoder_svc", "gateway": "gateway"}

app = App(
    name="chiasm",
    help="Serve vision-language models with the vision encoder and the language decoder as "
    "separate services.",
    version=__version__,
    help_format="plaintext",
    default_parameter=Parameter(negative=()),
)


def main() -> None:
    """Entry point of the console script. Never returns."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit code."""
    if arguments and arguments[0] in SERVICES:
        _become(SERVICES[arguments[0]], arguments[1:])
    try:
        command, bound, _ = app.parse_args(list(arguments), exit_on_error=False, print_error=False)
        result = command(*bound.args, **bound.kwargs)
    except (ValueError, CycloptsError) as error:
        return _complain(error, 2)
    except CommandFailed as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        return 130
    return result if isinstance(result, int) else 0


def _become(module: str, arguments: Sequence[str]) -> None:
    """Replaces this process by the service: signals and exit codes are its own."""
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


def _complain(error: Exception, code: int) -> int:
    print(f"chiasm: error: {' '.join(str(error).split())}", file=sys.stderr)
    return code


@app.command
def up(
    layout: Annotated[Layout | None, Parameter(name="*")] = None, *, print_config: bool = False
) -> int:
    """Serve a model on this machine: encoders, a decoder and a gateway, until Ctrl-C.

    Parameters
    ----------
    print_config
        Print the effective settings of the three services as YAML and exit.
    """
    layout = layout or Layout()
    if print_config:
        print(layout.describe(os.environ), end="")
        return 0
    return asyncio.run(serve_machine(layout))


@app.command
def demo(*, encoders: int = 2, tp_size: int = 1, pp_size: int = 1, verbose: bool = False) -> int:
    """Start everything on free ports, ask about the shipped pictures, check the answers, stop.

    Parameters
    ----------
    encoders
        Encoder processes.
    tp_size
        Tensor parallel ranks of the decoder.
    pp_size
        Pipeline stages of the decoder.
    verbose
        Show the logs of the services.
    """
    layout = Layout(
        encoders=encoders,
        tp_size=tp_size,
        pp_size=pp_size,
        port=0,
        drain_s=5.0,
        log_level="warning",
    )
    return asyncio.run(run_demo(layout, verbose=verbose))


@app.command
def ask(
    *words: str,
    url: str = DEFAULT_URL,
    max_tokens: int = 256,
    api_key_env: str = "OPENAI_API_KEY",
    tls: Annotated[Tls | None, Parameter(name="*")] = None,
) -> int:
    """Ask a running gateway: chiasm ask IMAGE... "question".

    Parameters
    ----------
    words
        Files or URLs of pictures and clips, then the question.
    url
        Root of the gateway.
    max_tokens
        Most tokens of the answer.
    api_key_env
        Variable that holds the API key.
    tls
        For a gateway behind https.
    """
    if not words:
        raise ValueError('say what to ask: chiasm ask IMAGE... "question"')
    *sources, question = words
    client = Client(url, api_key=os.environ.get(api_key_env, ""), tls=tls)
    return asyncio.run(_ask(client, sources, question, max_tokens))


async def _ask(client: Client, sources: Sequence[str], question: str, max_tokens: int) -> int:
    message = user_message(sources, question)
    async with client:
        request = {
            "model": await client.model(),
            "messages": [message],
            "temperature": 0,
            "max_tokens": max_tokens,
        }
        async for piece in client.stream(request):
            print(piece, end="", flush=True)
    print()
    return 0


@app.command
def bench(
    load: Annotated[Load | None, Parameter(name="*")] = None, *, url: str = DEFAULT_URL
) -> int:
    """Send load to a running gateway and print rates and latency percentiles.

    Parameters
    ----------
    url
        Root of the gateway.
    """

    async def send() -> int:
        async with Client(url) as client:
            return await run_bench(client, load or Load())

    return asyncio.run(send())


@app.command
def check(
    *,
    model: str | None = None,
    traffic: Annotated[Traffic | None, Parameter(name="*")] = None,
    ranks: Annotated[Ranks | None, Parameter(name="*")] = None,
) -> int:
    """Say what this machine can do: torch, GPUs, NIXL, RDMA, shared memory.

    With --model also how large a checkpoint is, which layouts fit, and whether splitting pays.

    Parameters
    ----------
    model
        Checkpoint directory, hub id or `demo` to look at as well.
    """
    return run_check(model, traffic or Traffic(), ranks or Ranks())


def encoder() -> None:
    """Run one encoder (see chiasm encoder --help)."""


def decoder() -> None:
    """Run one decoder (see chiasm decoder --help)."""


def gateway() -> None:
    """Run the gateway (see chiasm gateway --help)."""


for _service in (encoder, decoder, gateway):
    app.command(_service)  # listed here; `run` turns into the service before parsing
