"""Scripts for the world, the same in every run."""

from __future__ import annotations

import random
from collections.abc import Iterator


def scripts(seed: int, count: int) -> Iterator[bytes]:
    """`count` scripts of 20 to 160 bytes."""
    for number in range(count):
        source = random.Random(seed + number)
        yield source.randbytes(source.randint(20, 160))
