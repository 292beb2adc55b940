"""What every test relies on (one thread a process, no network), and the parity table at the end."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

# Before torch, tokenizers or huggingface_hub is imported anywhere, child processes included. Test
# workers share few cores, and a pool of threads in each makes all of them slow.
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")

HEADER = f"{'checkpoint':28} {'prompt':15} {'tokens':>6} {'rows':>9} {'logits':>9} equal ids"


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `make parity` asks for beyond the usual run."""
    parser.addoption("--every-layout", action="store_true", help="all layouts of all families")
    parser.addoption("--parity-page", help="write the parity table to this file")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Lines travel as test properties, so that they reach here from parallel workers too."""
    lines = list(_recorded(terminalreporter))
    if lines:
        terminalreporter.section("parity with transformers: largest difference, float32, CPU")
        for line in [HEADER, *lines]:
            terminalreporter.write_line(line)
        if page := terminalreporter.config.getoption("--parity-page"):
            text = _page(lines) + _layouts(terminalreporter)
            Path(page).write_text(text, encoding="utf-8")


def _page(lines: list[str]) -> str:
    """docs/parity.md: of the families' lines, those of checkpoints that are made here."""
    rows = [(line[:28].strip(), line[29:44].strip(), *line[44:].split()) for line in sorted(lines)]
    known = [row for row in rows if row[1] in _PROMPTS]
    known = [(*r[:3], "", "", *r[5:]) if r[1] == _TOKENS_ONLY else r for r in known]
    body = "".join(f"| {' | '.join(row)} |\n" for row in known)
    return _PAGE + body


def _layouts(reporter: pytest.TerminalReporter) -> str:
    """How many layouts of each architecture said the same, where all were tried."""
    counts: dict[str, list[int]] = {}
    for outcome in ("passed", "failed"):
        for report in reporter.getreports(outcome):
            found = _LAYOUT_TEST.search(report.nodeid)
            if found is None or report.when != "call":
                continue
            row = counts.setdefault(found[2], [0, 0, 0, 0])
            place = 2 if found[1] else 0
            row[place] += outcome == "passed"
            row[place + 1] += 1
    rows = (f"| {name} | {a}/{b} | {c}/{d} |\n" for name, (a, b, c, d) in sorted(counts.items()))
    return f"{_LAYOUTS}\nOf {date.today().isoformat()}, at {_commit()}.\n{_TABLE}{''.join(rows)}"


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "no known commit"
    return f"commit {done.stdout.strip()}"


_LAYOUT_TEST = re.compile(r"test_layouts_agree(_over_the_services)?\[(.*)-\(")
_LAYOUTS = """
# Layouts

The same 16 greedy tokens of five prompts (one twice, for the prefix cache) on tp {1, 2} x pp {1, 2,
4}, with experts also ep 2, x prompts in chunks of 16 or whole x prefix cache on and off. *whole*:
engine and rows in one process; *split*: encoder, decoder and gateway as services. 12 layers each.
"""
_TABLE = "\n| architecture | whole | split |\n|---|---:|---:|\n"

_TOKENS_ONLY = "text + image"
_PROMPTS = ("image", "2 images", "video", "text only", "text + image")
_PAGE = """\
# Parity with transformers

Written by `make parity`. Small random weights of the true architecture, float32 on a CPU.
transformers is given the same token ids and the same pixels; *rows* and *logits* are the largest
difference of any value, of all levels of the rows and of the logits of all 64 steps. *equal* counts
greedy tokens. In the last prompt of each, text and a picture are one batch, and only tokens are
compared. Tests fail above 1e-4. Checkpoints of full size in bfloat16 on a GPU:
[bench/RESULTS-families.md](../bench/RESULTS-families.md).

| architecture | prompt | prompt tokens | rows | logits | equal |
|---|---|---:|---:|---:|---:|
"""


def _recorded(reporter: pytest.TerminalReporter) -> Iterator[str]:
    for outcome in ("passed", "failed"):
        for report in reporter.getreports(outcome):
            for name, value in report.user_properties:
                if name == "parity" and report.when == "call":
                    yield str(value)
