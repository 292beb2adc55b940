"""A client that goes away cancels the work done for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive

from chiasm.errors import Cancelled


@asynccontextmanager
async def cancelled_when_gone(receive: Receive) -> AsyncIterator[None]:
    """Inside, the running task is cancelled when the client disconnects; leaving raises Cancelled.

    The body must have been read: nothing but the disconnect may still come.
    """
    task = asyncio.current_task()
    assert task is not None, "runs inside a task"
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            raise Cancelled("the client went away") from None
        raise
    finally:
        watcher.cancel()
