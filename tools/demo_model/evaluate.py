"""Prints the share of exact answers per task on unseen seeds.

Asks the checkpoint through transformers, or with --base-url a running server.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch

from tools.demo_model.answer import Answerer, Checkpoint, Endpoint
from tools.demo_model.questions import TASKS, question


@dataclass(frozen=True, slots=True)
class Score:
    """How one task went."""

    task: str
    right: int
    asked: int
    failed: int
    mistakes: tuple[str, ...]


def _ask(answerer: Answerer, task: str, index: int) -> tuple[str, str | None]:
    asked = question(task, index)
    try:
        return asked.answer, answerer.answer(asked.messages)
    except httpx.HTTPError as error:
        print(f"{task} {index}: {error}", flush=True)
        return asked.answer, None


def score(answerer: Answerer, task: str, *, count: int, clients: int) -> Score:
    """Ask `count` questions of a task."""
    with ThreadPoolExecutor(clients) as pool:
        results = list(pool.map(lambda index: _ask(answerer, task, index), range(count)))
    right = sum(wanted == given for wanted, given in results)
    failed = sum(given is None for _, given in results)
    mistakes = [f"{wanted!r}, answered {given!r}" for wanted, given in results if wanted != given]
    return Score(task, right, count, failed, tuple(mistakes))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=Path("chiasm/demo/checkpoint"))
    parser.add_argument("--base-url", help="ask this server instead, such as http://127.0.0.1:8000")
    parser.add_argument("--count", type=int, default=200, help="questions per task")
    parser.add_argument("--clients", type=int, default=8, help="requests at a time to a server")
    parser.add_argument("--task", action="append", choices=tuple(TASKS), help="only this task")
    parser.add_argument("--mistakes", action="store_true", help="list the wrong answers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    answerer: Answerer
    if options.base_url:
        answerer, clients = Endpoint(options.base_url), options.clients
    else:
        answerer, clients = Checkpoint(options.checkpoint), 1
    print("| task | exact | asked | failed | seconds |\n|---|---|---|---|---|")
    for task in options.task or TASKS:
        began = time.monotonic()
        result = score(answerer, task, count=options.count, clients=clients)
        share = f"{100 * result.right / result.asked:.1f} %"
        seconds = f"{time.monotonic() - began:.0f}"
        print(f"| {task} | {share} | {result.asked} | {result.failed} | {seconds} |", flush=True)
        for mistake in result.mistakes if options.mistakes else ():
            print(f"    {mistake}")


if __name__ == "__main__":
    main()
