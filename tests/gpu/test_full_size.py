"""Families at full size, random weights, bfloat16: they load, equal the reference, and serve.

Each needs room for its weights in shared memory (8 billion parameters: 18 GB; 30B-A3B: 62 GB) and
twice that on the GPU.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.family_shapes import SHAPES

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path("/dev/shm")
LEAST = 0.999
LARGE = {"Qwen3-VL-30B-A3B": ("--no-float32", "--serve-last")}
BYTES = {"Qwen3-VL-30B-A3B": 64 << 30}

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.mark.parametrize("eight_bits", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("name", SHAPES)
def test_rows_logits_and_answers(name: str, eight_bits: bool, tmp_path: Path) -> None:
    if shutil.disk_usage(SHARED).free < BYTES.get(name, 24 << 30):
        pytest.skip("too little shared memory")
    directory, found = SHARED / f"chiasm-{tmp_path.parent.name}", tmp_path / "found.json"
    command = [sys.executable, "-m", "bench.families", "--family", name, "--dir", str(directory)]
    command += ["--json", str(found), *LARGE.get(name, ())]
    subprocess.run([*command, *(["--eight-bits"] * eight_bits)], cwd=ROOT, check=True)
    results = json.loads(found.read_text())
    assert results["rows"]["least"] >= LEAST
    # Rows of 8-bit products are rounded to 8 bits, which the reference's are not.
    assert results["logits"]["mean"] >= (0.98 if eight_bits else LEAST)
    for answer in (results["served_first"], results["served_second"]):
        assert answer["prompt_tokens_equal"]
        assert answer["usage"]["completion_tokens"] == 32
