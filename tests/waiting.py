"""Waiting for what must come true, however slow the machine: nothing is ever slept for.

A test that passes leaves as soon as its condition holds. The deadline only names what is missing
before pytest's own timeout ends the test without a word.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

DEADLINE_S = 100.0
_POLL_S = 0.01


async def until(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Returns once `condition` holds. Raises TimeoutError."""
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(_POLL_S)


def blocked_until(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """The same, for tests without an event loop. Raises TimeoutError."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {deadline_s:g} s")
        time.sleep(_POLL_S)
