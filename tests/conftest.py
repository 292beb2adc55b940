"""What every test relies on (one thread a process, no network), and the parity table at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Before torch, tokenizers or huggingface_hub is imported anywhere, child processes included. Test
# workers share few cores, and a pool of threads in each makes all of them slow.
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")

HEADER = f"{'checkpoint':20} {'prompt':15} {'tokens':>6} {'rows':>9} {'logits':>9} equal ids"


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `make parity` asks for beyond the usual run."""
    parser.addoption("--every-layout", action="store_true", help="all layouts of all families")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Lines travel as test properties, so that they reach here from parallel workers too."""
    lines = list(_recorded(terminalreporter))
    if lines:
        terminalreporter.section("parity with transformers: largest difference, float32, CPU")
        for line in [HEADER, *lines]:
            terminalreporter.write_line(line)


def _recorded(reporter: pytest.TerminalReporter) -> Iterator[str]:
    for outcome in ("passed", "failed"):
        for report in reporter.getreports(outcome):
            for name, value in report.user_properties:
                if name == "parity" and report.when == "call":
                    yield str(value)
