"""chiasm against `transformers serve`: the demo model on this machine's CPU, in one run.

Both serve the same checkpoint in processes of their own; one is loaded while the other idles, turn
about, `--rounds` times. Run it as `python -m bench.cpu` (`make bench-cpu`), with nothing beside it.
Exit code 1: fewer than 3 times the requests per second at 8 or 32 clients, or other answers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import shlex
import socket
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from bench import cores
from bench.load import Target, Window, run_round
from bench.pool import Pool
from bench.report import Findings, Turn, compare, surroundings, table
from chiasm.checkpoint import resolve_model
from chiasm.cli.failure import CommandFailed
from chiasm.cli.machine import Layout, Machine
from chiasm.process import DidNotStart, Spec, Supervisor

GOAL = 3.0
HELD_TO_GOAL = (8, 32)
MOST_DIFFERENT = 0.01  # of the questions: the two resize pictures with other arithmetic
DRAIN_S = 5.0
WARM_UP = Window(ramp_s=0.0, length_s=3.0)
RESULTS = Path(__file__).with_name("RESULTS.md")


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.cpu", description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--window-s", type=float, default=10.0, help="counted, of each round")
    parser.add_argument("--ramp-s", type=float, default=3.0, help="not counted, before it")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--pictures", type=int, default=240, help="different drawings")
    parser.add_argument("--serve-flags", default="", help="more flags for `transformers serve`")
    parser.add_argument(
        "--wait-s", type=float, default=0.0, help="longest wait for a quiet machine, each time"
    )
    parser.add_argument("--note", default="", help="what else ran, for the results")
    parser.add_argument("--no-write", action="store_true", help="do not append to RESULTS.md")
    return parser.parse_args()


class Arena:
    """Both servers, started; ends them on leaving.

    Args:
        serve_flags: More flags for the peer.
    """

    def __init__(self, serve_flags: str) -> None:
        layout = Layout(encoders=1, port=0, drain_s=DRAIN_S, log_level="warning")
        self._machine = Machine(layout, _relay)
        self._peer = Supervisor(_relay, stop_s=DRAIN_S)
        self._flags = shlex.split(serve_flags)

    async def start(self) -> tuple[Target, Target]:
        """chiasm and the peer. Raises CommandFailed or DidNotStart."""
        checkpoint = str(resolve_model("demo"))
        own = await self._machine.start()
        command = (sys.executable, "-m", "bench.peer_serve", "--port", str(_free_port()))
        spec = Spec("serve", (*command, checkpoint, *self._flags))
        ready = await self._peer.launch(spec)
        return (
            Target("chiasm", own.url, "demo"),
            Target("transformers serve", f"http://{ready['address']}", checkpoint),
        )

    def pids(self) -> Iterable[int]:
        """Processes of both."""
        return (*self._machine.supervisor.pids().values(), *self._peer.pids().values())

    async def stop(self) -> None:
        """Ends both."""
        await asyncio.gather(self._machine.supervisor.stop(), self._peer.stop())


@contextlib.asynccontextmanager
async def arena(serve_flags: str) -> AsyncIterator[Arena]:
    """An Arena that is stopped whatever happens."""
    servers = Arena(serve_flags)
    try:
        yield servers
    finally:
        await servers.stop()


async def measure(args: argparse.Namespace, pool: Pool) -> Findings:
    """All rounds: for each number of clients chiasm, then the peer, and all over again."""
    findings = Findings()
    window = Window(args.ramp_s, args.window_s)
    async with arena(args.serve_flags) as servers:
        ours, peer = await servers.start()
        for target in (ours, peer):
            await run_round(
                target, pool, first=0, clients=4, window=WARM_UP, max_tokens=args.max_tokens
            )
        sides = ((ours, findings.ours), (peer, findings.peers))
        share = len(pool.items) // args.rounds
        for number in range(1, args.rounds + 1):
            for clients in args.clients:
                cores.wait_until_quiet(args.wait_s)
                for target, turns in sides:  # the same questions for both, others each round
                    before = cores.read(servers.pids())
                    done = await run_round(
                        target,
                        pool,
                        first=share * (number - 1),
                        clients=clients,
                        window=window,
                        max_tokens=args.max_tokens,
                    )
                    use = cores.between(before, cores.read(servers.pids()))
                    turns[clients].append(Turn(done, use))
                    print(
                        f"round {number}, {clients:>2} clients, {target.name}: {done.rate:.1f} "
                        f"requests/s on {use.own:.2f} cores, others on {use.others:.2f}",
                        flush=True,
                    )
    return findings


def write_down(args: argparse.Namespace, text: str) -> None:
    """Appends a section to RESULTS.md."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    command = shlex.join(("python", "-m", "bench.cpu", *sys.argv[1:]))
    rounds = f"{args.rounds} rounds of {args.window_s:g} s; medians, in brackets each round."
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(f"\n## {now}\n\n`{command}`\n\n{rounds}\n\n{text}\n")


def main() -> None:
    """Measures, prints, writes down, judges."""
    args = options()
    pool = Pool(args.pictures)
    try:
        findings = asyncio.run(measure(args, pool))
    except (CommandFailed, DidNotStart) as error:
        sys.exit(f"bench: {error}")
    agreement = compare(findings, pool)
    notes = [f"Beside it: {args.note}"] if args.note else []
    text = "\n\n".join((table(findings), agreement.text(), surroundings(findings), *notes))
    print(f"\n{text}")
    if not args.no_write:
        write_down(args, text)
    fast = all(findings.ratio(n) >= GOAL for n in args.clients if n in HELD_TO_GOAL)
    alike = len(agreement.different) <= MOST_DIFFERENT * agreement.asked
    sys.exit(0 if fast and alike else 1)


def _relay(name: str, line: str) -> None:
    """Only what the servers complain about is shown."""
    if "ERROR" in line or "Traceback" in line:
        print(f"{name} | {line}", file=sys.stderr)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
