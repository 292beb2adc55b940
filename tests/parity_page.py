"""docs/parity.md: lines of tests against transformers, and which cells of layouts said the same.

Cells are kept in a file as they finish, so that a run of hours may be stopped and gone on with.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

DIRTY = "-dirty"
_TEST = re.compile(r"test_layouts_agree(_over_the_services)?\[(.*)-(\(.*\))\]$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One architecture on one layout under one setting of chunk and cache, as it was tried."""

    split: bool
    architecture: str
    setting: str
    passed: bool
    seconds: float
    commit: str
    day: str

    @property
    def key(self) -> tuple[bool, str, str]:
        """Which cell it is."""
        return self.split, self.architecture, self.setting


def key_of(nodeid: str) -> tuple[bool, str, str] | None:
    """The cell that a test is; None for other tests."""
    found = _TEST.search(nodeid)
    return None if found is None else (bool(found[1]), found[2], found[3])


class LayoutRecord:
    """Cells that have been tried, the newest of each.

    Args:
        file: Where they are kept, a line each; None: nowhere.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._cells: dict[tuple[bool, str, str], Cell] = {}
        self._commit = commit_of_tree()
        if file is not None and file.exists():
            for line in file.read_text(encoding="utf-8").splitlines():
                cell = Cell(**json.loads(line))
                self._cells[cell.key] = cell

    @property
    def finished(self) -> list[list[str | bool]]:
        """Keys of cells that passed at this commit, with nothing changed since."""
        cells = self._cells.values()
        same = [c.key for c in cells if c.passed and c.commit == self._commit]
        return [] if self._commit.endswith(DIRTY) else [list(key) for key in same]

    def add(self, nodeid: str, *, passed: bool, seconds: float) -> None:
        """Takes a test's outcome in, if it is one of a cell."""
        key = key_of(nodeid)
        if key is None:
            return
        cell = Cell(
            split=key[0],
            architecture=key[1],
            setting=key[2],
            passed=passed,
            seconds=round(seconds, 2),
            commit=self._commit,
            day=date.today().isoformat(),
        )
        self._cells[cell.key] = cell
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(cell)) + "\n")

    def page(self) -> str:
        """How many cells of each architecture said the same, where all were tried, and when."""
        counts: dict[str, list[int]] = {}
        for (split, name, _), cell in self._cells.items():
            row = counts.setdefault(name, [0, 0, 0, 0])
            row[2 * split] += cell.passed
            row[2 * split + 1] += 1
        rows = "".join(
            f"| {name} | {a}/{b} | {c}/{d} |\n" for name, (a, b, c, d) in sorted(counts.items())
        )
        origins = "".join(self._origins())
        return f"{_LAYOUTS}\n{origins}{_TABLE}{rows}"

    def _origins(self) -> Iterator[str]:
        for split, word in enumerate(("whole", "split")):
            cells = [cell for cell in self._cells.values() if cell.split == bool(split)]
            found = Counter((cell.day, cell.commit) for cell in cells)
            told = ", ".join(f"{n} of {day} at {commit}" for (day, commit), n in found.items())
            if told:
                yield f"*{word}*: {told}.\n"


def families_page(lines: Iterable[str]) -> str:
    """Of the families' lines, those of checkpoints that are made here."""
    rows = [(line[:28].strip(), line[29:44].strip(), *line[44:].split()) for line in sorted(lines)]
    known = [row for row in rows if row[1] in _PROMPTS]
    known = [(*r[:3], "", "", *r[5:]) if r[1] == _TOKENS_ONLY else r for r in known]
    body = "".join(f"| {' | '.join(row)} |\n" for row in known)
    return _PAGE + body


def commit_of_tree() -> str:
    """The commit that is checked out, marked if files other than documents have changed since."""
    commit, changes = _git("rev-parse", "--short=7", "HEAD"), _git("diff", "HEAD", "--", ":!docs")
    return f"commit {commit}{DIRTY if changes else ''}" if commit else f"no known commit{DIRTY}"


def _git(*command: str) -> str:
    """What git says, with nothing where there is none."""
    tree = ("git", "-C", str(Path(__file__).parent.parent))
    try:
        done = subprocess.run((*tree, *command), capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


_LAYOUTS = """
# Layouts

The same 16 greedy tokens of five prompts (one twice, for the prefix cache) as one rank gives that
reads prompts whole, on tp {1, 2} x pp {1, 2, 4}, with experts also ep 2, x prompts in chunks of 16
or whole x prefix cache on and off. 12 layers each; several ranks are as many processes. *whole*:
engine and rows in one process, no services. *split*: encoder, decoder and gateway serve on ports of
their own and talk over them, all three in the test's process; a client asks, some prompts at once.
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
