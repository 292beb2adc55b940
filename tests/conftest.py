"""What every test relies on (one thread a process, no network), and the parity table at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.parity_page import LayoutRecord, families_page, key_of

# Before torch, tokenizers or huggingface_hub is imported anywhere, child processes included. Test
# workers share few cores, and a pool of threads in each makes all of them slow.
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")

HEADER = f"{'checkpoint':28} {'prompt':15} {'tokens':>6} {'rows':>9} {'logits':>9} equal ids"
_RECORD = pytest.StashKey[LayoutRecord]()
_FINISHED = "finished layouts"


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `make parity` asks for beyond the usual run."""
    parser.addoption("--every-layout", action="store_true", help="all layouts of all families")
    parser.addoption("--parity-page", help="write the parity table to this file")
    parser.addoption(
        "--layout-record", help="keep the outcomes of layouts here; what has passed is not repeated"
    )


def _any_speed() -> None:
    """Nothing depends on the machine's speed: Hypothesis would fail an example that takes 0.2 s."""
    from hypothesis import HealthCheck, settings

    slow = [HealthCheck.too_slow]
    settings.register_profile("any-speed", deadline=None, suppress_health_check=slow)
    settings.load_profile("any-speed")


def pytest_configure(config: pytest.Config) -> None:
    """Reads the record once: workers are told, as all of them must find the same tests."""
    if config.pluginmanager.hasplugin("hypothesispytest"):  # a machine for GPU tests has none
        _any_speed()
    if not hasattr(config, "workerinput"):
        file = config.getoption("--layout-record")
        record = config.stash[_RECORD] = LayoutRecord(Path(file) if file else None)
        config.pluginmanager.register(_Keeper(record))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tells a worker what is in the record."""
    node.workerinput[_FINISHED] = node.config.stash[_RECORD].finished


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is in the record."""
    told = getattr(config, "workerinput", None)
    keys = config.stash[_RECORD].finished if told is None else told[_FINISHED]
    finished = {tuple(key) for key in keys}
    done = [item for item in items if key_of(item.nodeid) in finished]
    if done:
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if key_of(item.nodeid) not in finished]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Lines travel as test properties, so that they reach here from parallel workers too."""
    lines = list(_recorded(terminalreporter))
    if lines:
        terminalreporter.section("parity with transformers: largest difference, float32, CPU")
        for line in [HEADER, *lines]:
            terminalreporter.write_line(line)
        if page := terminalreporter.config.getoption("--parity-page"):
            record = terminalreporter.config.stash[_RECORD]
            Path(page).write_text(families_page(lines) + record.page(), encoding="utf-8")


class _Keeper:
    """Hears of every test's end, in whichever worker."""

    def __init__(self, record: LayoutRecord) -> None:
        self._record = record

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A cell that could not even be set up has not been tried."""
        if report.when == "call" and not report.skipped:
            self._record.add(report.nodeid, passed=report.passed, seconds=report.duration)


def _recorded(reporter: pytest.TerminalReporter) -> Iterator[str]:
    for outcome in ("passed", "failed"):
        for report in reporter.getreports(outcome):
            for name, value in report.user_properties:
                if name == "parity" and report.when == "call":
                    yield str(value)
