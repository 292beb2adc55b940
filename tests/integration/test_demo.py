"""`chiasm demo` as a newcomer runs it: the shipped model is right about every shipped picture."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from chiasm.cli.demo import FEWEST_QUESTIONS
from chiasm.demo import demo_cases

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(400)
def test_the_demo_answers_every_question_rightly() -> None:
    cases = demo_cases()
    assert len(cases) >= FEWEST_QUESTIONS
    done = subprocess.run(
        [sys.executable, "-m", "chiasm.cli", "demo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(cases)} of {len(cases)} answers are right" in done.stdout
    assert "expected:" not in done.stdout
    for column in ("encode", "transfer", "prefill", "first_token"):
        assert column in done.stdout
    assert done.stderr == "", "an orderly run says nothing on stderr"
