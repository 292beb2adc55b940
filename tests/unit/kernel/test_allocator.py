"""Freed memory stays with the process that will want it again."""

from __future__ import annotations

import subprocess
import sys

import pytest

PAGE_FAULTS = """
import ctypes, resource, sys
from chiasm.allocator import keep_freed_memory

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # no huge pages: a fault is 4 kB on every machine

if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit("unknown here")

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        blocks = [bytearray(8 << 20) for _ in range(4)]
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults())
"""


def page_faults(how: str) -> int:
    command = [sys.executable, "-c", PAGE_FAULTS, how]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unknown here" in done.stderr:
        pytest.skip("not glibc")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_blocks_that_come_and_go_cost_no_page_faults() -> None:
    assert page_faults("keep") < 100
    assert page_faults("as it is") > 1000, "nothing to avoid: the module can go"
