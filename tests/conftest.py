"""What every test relies on (one thread a process, no network), and the parity table at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
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
            Path(page).write_text(_page(lines), encoding="utf-8")


def _page(lines: list[str]) -> str:
    """docs/parity.md: of the families' lines, those of checkpoints that are made here."""
    rows = [(line[:28].strip(), line[29:44].strip(), *line[44:].split()) for line in sorted(lines)]
    known = [row for row in rows if row[1] in _PROMPTS]
    known = [(*r[:3], "", "", *r[5:]) if r[1] == _TOKENS_ONLY else r for r in known]
    body = "".join(f"| {' | '.join(row)} |\n" for row in known)
    return _PAGE + body


_TOKENS_ONLY = "text + image"
_PROMPTS = ("image", "2 images", "video", "text only", "text + image")
_PAGE = """\
# Parity with transformers

Written by `make parity`. Small random weights of the true architecture, float32 on a CPU.
transformers is given the same token ids and the same pixels; *rows* and *logits* are the largest
difference of any value, of all levels of the rows and of the logits of all 64 steps. *equal* counts
greedy tokens. In the last prompt of each, text and a picture are one batch, and only tokens are
compared. Tests fail above 1e-4.

| architecture | prompt | prompt tokens | rows | logits | equal |
|---|---|---:|---:|---:|---:|
"""


def _recorded(reporter: pytest.TerminalReporter) -> Iterator[str]:
    for outcome in ("passed", "failed"):
        for report in reporter.getreports(outcome):
            for name, value in report.user_properties:
                if name == "parity" and report.when == "call":
                    yield str(value)
