"""`chiasm demo`: starts everything on free ports, asks about the shipped pictures."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from chiasm.cli.client import Answer, Client, user_message
from chiasm.cli.failure import CommandFailed
from chiasm.cli.machine import Layout, Machine
from chiasm.cli.terminal import LogPrinter
from chiasm.cli.up import start_with_progress
from chiasm.demo import DemoCase, demo_cases

FEWEST_QUESTIONS = 6
STAGES = ("fetch", "plan", "queue", "encode", "transfer", "prefill", "first_token", "decode")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A case and what the model said."""

    case: DemoCase
    answer: Answer

    @property
    def right(self) -> bool:
        """Whether the answer is the one that ships with the picture."""
        return self.answer.text.strip() == self.case.answer.strip()


async def run_demo(layout: Layout, *, verbose: bool = False) -> int:
    """Asks every shipped case once.

    Returns:
        0 when at least `FEWEST_QUESTIONS` were asked and every answer is right, else 1.

    Raises:
        CommandFailed: A service did not start, or a request failed.
    """
    console = Console(width=None if sys.stdout.isatty() else 110)
    printer = LogPrinter(Console(stderr=True))

    def relay(name: str, line: str) -> None:
        if verbose or name == "chiasm":
            printer(name, line)

    async with Machine(layout, relay) as machine:
        encoders = f"{layout.num_encoders} encoders"
        console.print(
            f"Starting {encoders}, a decoder and a gateway, each its own process", highlight=False
        )
        addresses = await start_with_progress(machine, console)
        for name, pid in machine.supervisor.pids().items():
            console.print(f"  {name:<10} pid {pid}", highlight=False)
        async with Client(addresses.url) as client:
            outcomes = await _ask_all(client, demo_cases())
    console.print(_answers(outcomes))
    console.print(_timelines(outcomes))
    right = sum(outcome.right for outcome in outcomes)
    console.print(f"{right} of {len(outcomes)} answers are right", style="bold", highlight=False)
    return 0 if right == len(outcomes) >= FEWEST_QUESTIONS else 1


async def _ask_all(client: Client, cases: Sequence[DemoCase]) -> list[Outcome]:
    model = await client.model()
    outcomes = []
    for case in cases:
        request = {
            "model": model,
            "messages": [user_message(case.parts, case.question)],
            "temperature": 0,
            "max_tokens": 64,
            "return_timings": True,
        }
        try:
            outcomes.append(Outcome(case, await client.answer(request)))
        except CommandFailed as error:
            raise CommandFailed(f"{case.title}: {error}") from error
    return outcomes


def _answers(outcomes: Sequence[Outcome]) -> Table:
    table = Table(title="Questions about the shipped pictures", title_justify="left", expand=False)
    table.add_column("#", justify="right")
    table.add_column("shown")
    table.add_column("question")
    table.add_column("answer")
    table.add_column("", justify="center")
    for number, outcome in enumerate(outcomes, start=1):
        answer = Text(outcome.answer.text.strip())
        if not outcome.right:
            answer.append(f"\n(expected: {outcome.case.answer})", "dim")
        table.add_row(
            str(number),
            Text("\n".join(part.name for part in outcome.case.parts) or "-"),
            Text(outcome.case.question),
            answer,
            Text("✓", "green") if outcome.right else Text("✗", "red"),
        )
    return table


def _timelines(outcomes: Sequence[Outcome]) -> Table:
    table = Table(
        title="Where the time went (ms; first_token counts from the start of the request)",
        title_justify="left",
    )
    table.add_column("#", justify="right")
    table.add_column("tokens", justify="right")
    for stage in STAGES:
        table.add_column(stage, justify="right")
    for number, outcome in enumerate(outcomes, start=1):
        answer = outcome.answer
        tokens = f"{answer.prompt_tokens} + {answer.completion_tokens}"
        values = [answer.timings.get(stage) for stage in STAGES]
        cells = ["-" if value is None else f"{value:.1f}" for value in values]
        table.add_row(str(number), tokens, *cells)
    return table
