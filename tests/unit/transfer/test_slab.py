"""The slab between processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from decoder_svc.embeddings.slab import Slab

ATTACH = """
import sys
from decoder_svc.embeddings.slab import Slab
with Slab(16, name=sys.argv[1]) as slab:
    assert bytes(slab.view()[:3]) == b"abc"
    slab.write(3, b"def")
"""


def test_another_process_sees_and_writes_the_same_bytes_and_leaves_them_alone() -> None:
    with Slab(16) as slab:
        slab.write(0, b"abc")
        subprocess.run(
            [sys.executable, "-c", ATTACH, slab.name],
            check=True,
            timeout=110,
            cwd=Path(__file__).parents[3],
        )
        assert bytes(slab.view()[:6]) == b"abcdef"
        assert Path("/dev/shm", slab.name).exists()
    assert not Path("/dev/shm", slab.name).exists()
    slab.close()  # idempotent
    with pytest.raises(FileNotFoundError):
        Slab(16, name=slab.name)


def test_no_byte_leaves_the_slab() -> None:
    with Slab(16) as slab:
        for offset, data in ((-1, b"x"), (15, b"xy"), (1 << 60, b"x")):
            with pytest.raises(ValueError, match="outside"):
                slab.write(offset, data)
        slab.write(15, b"x")
    with pytest.raises(ValueError, match="at least one byte"):
        Slab(0)


CREATE = """
import time
from decoder_svc.embeddings.slab import Slab
print(Slab(16).name, flush=True)
time.sleep(600)
"""


def test_what_a_killed_creator_left_is_removed_by_the_next_and_a_live_one_is_kept() -> None:
    creators = [
        subprocess.Popen([sys.executable, "-c", CREATE], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        paths = [
            Path("/dev/shm", creator.stdout.readline().strip())
            for creator in creators
            if creator.stdout is not None
        ]
        creators[0].kill()
        creators[0].wait()
        assert all(path.exists() for path in paths)
        with Slab(16):
            assert [path.exists() for path in paths] == [False, True]
    finally:
        for creator in creators:
            creator.kill()
            creator.communicate()
    with Slab(16):
        assert not any(path.exists() for path in paths)
