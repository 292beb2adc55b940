"""Waiting a moment for a peer that may be just restarting, instead of failing at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from chiasm.errors import ChiasmError

PATIENCE_S = 3.0
_POLL_S = 0.05

Found = TypeVar("Found")


async def soon(find: Callable[[], Found | None], *, otherwise: ChiasmError) -> Found:
    """What `find` finds within PATIENCE_S. Raises `otherwise`."""
    for _ in range(round(PATIENCE_S / _POLL_S)):
        if (found := find()) is not None:
            return found
        await asyncio.sleep(_POLL_S)
    raise otherwise
