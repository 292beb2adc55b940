"""What a run of `bench.cpu` found, as Markdown."""

from __future__ import annotations

import platform
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bench.cores import Use, describe
from bench.load import Round, Sample
from bench.pool import Pool
from chiasm.cli.bench import percentile

HEADER = (
    "| clients | chiasm requests/s | serve requests/s | ratio | chiasm first token p50 / p99 "
    "| chiasm whole p50 / p99 | serve whole p50 / p99 | CPU ms a request, chiasm / serve |\n"
    "|---|---|---|---|---|---|---|---|"
)
_PACKAGES = ("torch", "transformers", "torchvision", "grpcio", "aiohttp")


@dataclass(frozen=True, slots=True)
class Turn:
    """One round, and the cores used from its first request to its last answer."""

    round: Round
    use: Use

    @property
    def cpu_ms(self) -> float:
        """CPU time a request, of the servers and the clients."""
        return self.use.own * self.use.seconds * 1e3 / self.round.num_sent


@dataclass(slots=True)
class Findings:
    """Turns by number of clients, in the order they were run; one list a server."""

    ours: dict[int, list[Turn]] = field(default_factory=lambda: defaultdict(list))
    peers: dict[int, list[Turn]] = field(default_factory=lambda: defaultdict(list))

    def ratio(self, clients: int) -> float:
        """Median rate over median rate."""
        return _median(self.ours[clients]) / _median(self.peers[clients])


@dataclass(frozen=True, slots=True)
class Agreement:
    """How the two servers answered the questions that both were asked."""

    asked: int
    different: tuple[str, ...]
    right: tuple[float, float]
    """Share of answers that are the expected ones: ours, the peer's."""

    def text(self) -> str:
        """One sentence, and the differences."""
        ours, peer = (f"{100 * share:.1f} %" for share in self.right)
        lines = [
            f"Answers: equal for {self.asked - len(self.different)} of {self.asked} questions "
            f"(right: chiasm {ours}, serve {peer})."
        ]
        return "\n".join([*lines, *(f"    {difference}" for difference in self.different)])


def compare(findings: Findings, pool: Pool) -> Agreement:
    """Every answer of one server with every answer of the other to the same question."""
    ours, peers = (_answers(side) for side in (findings.ours, findings.peers))
    both = sorted(ours.keys() & peers.keys())
    different = tuple(
        f"{pool.items[item].text!r}: chiasm {sorted(ours[item])}, serve {sorted(peers[item])}"
        for item in both
        if len(ours[item] | peers[item]) > 1
    )
    right = tuple(
        statistics.mean(pool.items[item].answer in side[item] for item in both)
        for side in (ours, peers)
    )
    return Agreement(len(both), different, (right[0], right[1]))


def table(findings: Findings) -> str:
    """One line per number of clients; medians over rounds, percentiles over all requests."""
    lines = [HEADER]
    for clients, ours in findings.ours.items():
        peers = findings.peers[clients]
        cpu_ms = (statistics.median(t.cpu_ms for t in turns) for turns in (ours, peers))
        cells = (
            str(clients),
            _rates(ours),
            _rates(peers),
            f"**{findings.ratio(clients):.2f}**",
            _ms([s.first_s for s in _samples(ours)]),
            _ms([s.total_s for s in _samples(ours)]),
            _ms([s.total_s for s in _samples(peers)]),
            " / ".join(f"{ms:.0f}" for ms in cpu_ms),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def surroundings(findings: Findings) -> str:
    """Machine, versions, commit, and what else kept the cores busy."""
    sides = (findings.ours, findings.peers)
    turns = [t for side in sides for some in side.values() for t in some]
    others = sorted(t.use.others for t in turns)
    packages = ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)
    return (
        f"{describe()}; Python {platform.python_version()}, {packages}; commit {_commit()}. "
        f"Cores that other programs of the machine used meanwhile: {others[0]:.2f} to "
        f"{others[-1]:.2f}, median {statistics.median(others):.2f}."
    )


def _samples(turns: Iterable[Turn]) -> Iterator[Sample]:
    return (sample for turn in turns for sample in turn.round.samples)


def _answers(side: dict[int, list[Turn]]) -> dict[int, set[str]]:
    texts: dict[int, set[str]] = defaultdict(set)
    for turns in side.values():
        for sample in _samples(turns):
            texts[sample.item].add(sample.text)
    return texts


def _median(turns: Sequence[Turn]) -> float:
    return statistics.median(t.round.rate for t in turns)


def _rates(turns: Sequence[Turn]) -> str:
    return f"{_median(turns):.1f} ({', '.join(f'{t.round.rate:.1f}' for t in turns)})"


def _ms(seconds: Sequence[float]) -> str:
    p50, p99 = (percentile(seconds, p) * 1e3 for p in (50, 99))
    return f"{p50:.0f} / {p99:.0f} ms"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def _commit() -> str:
    root = Path(__file__).resolve().parents[1]

    def git(*words: str) -> str:
        done = subprocess.run(("git", *words), cwd=root, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "*.py")
    return git("rev-parse", "--short", "HEAD") + (" with changes" if changed else "")
