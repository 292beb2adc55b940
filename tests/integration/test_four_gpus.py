"""The script for four GPUs, whole, with a small model on CPUs: seldom run, it must not rot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.traced_rank import covered

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_rehearsal_fills_every_cell_it_can(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "bench" / "four_gpus.sh", "--rehearse", tmp_path],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert not done.returncode, done.stdout[-4000:] + done.stderr[-4000:]
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    cells = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
        for line in table.splitlines()
        if line.startswith("| ")
    }
    assert all(cells["batch 1"][at] for at in (0, 3)), "one GPU, TP2 x PP2"
    for words in ("first token, 2 x 1080p", "clip, end to end", "clip, prompt tokens"):
        assert all(cells[words]), words
    assert cells["clip, prompt tokens"] == ["1,500", "1,500"]
    assert 0.0 < float(cells["least busy GPU at batch 128"][1]) <= 1.0
    assert cells["other first choices than one GPU, TP2 x PP2"][1].startswith("0 of ")


def test_time_that_two_kernels_share_counts_once() -> None:
    assert covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (5.2, 5.4)]) == 4.0
    assert covered([]) == 0.0
