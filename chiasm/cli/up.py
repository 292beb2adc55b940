"""`chiasm up`: all services on this machine until Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import signal

from rich.console import Console

from chiasm.cli.client import Client
from chiasm.cli.machine import Addresses, Layout, Machine
from chiasm.cli.terminal import LogPrinter, sign_of_life


async def serve_machine(layout: Layout) -> int:
    """Starts the services and supervises them; SIGINT, SIGTERM or SIGHUP ends, a second one kills.

    Returns:
        The exit code: 0 after an orderly end.
    """
    console = Console(stderr=True)
    stop = asyncio.Event()
    async with Machine(layout, LogPrinter(console)) as machine:

        def received() -> None:
            if stop.is_set():
                machine.supervisor.kill()
            stop.set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, received)
        starting = asyncio.create_task(start_with_progress(machine, console))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            await machine.supervisor.stop()
            await asyncio.wait({starting})
            starting.exception()  # it failed because we ended its children
        else:
            await _announce(Console(), starting.result())
            await stopping
        console.print("stopping; Ctrl-C again kills", highlight=False)
    return 0


async def start_with_progress(machine: Machine, console: Console) -> Addresses:
    """`machine.start()` with a sign of life while it takes long."""

    def waiting() -> str:
        return f"waiting for {', '.join(machine.supervisor.waiting_for) or 'the gateway'}"

    async with sign_of_life(console, waiting):
        return await machine.start()


async def _announce(console: Console, addresses: Addresses) -> None:
    async with Client(addresses.url) as client:
        model = await client.model()
    request = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
    lines = [
        f"\n{model} is served at {addresses.url}",
        f"  REST  {addresses.url}/v1   (documentation: {addresses.url}/docs)",
        *([f"  gRPC  {addresses.grpc}"] if addresses.grpc else []),
        "Try it:",
        f"  curl {addresses.url}/v1/chat/completions -H 'content-type: application/json' \\",
        f"    -d '{json.dumps(request)}'",
        "Stop it with Ctrl-C.\n",
    ]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
