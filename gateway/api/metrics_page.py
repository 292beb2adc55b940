"""The text of /metrics: this process's own, or what the parent of several workers has summed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import aiohttp
from prometheus_client import generate_latest

from chiasm.errors import Unavailable
from chiasm.telemetry import GatewayMetrics

_ANSWER_S = 5.0


def page_of(metrics: GatewayMetrics, parent: str = "") -> Callable[[], Awaitable[bytes]]:
    """Makes the page anew each time it is called.

    Args:
        metrics: This process's.
        parent: host:port of who sums those of all workers; empty: there is nobody.
    """

    async def own() -> bytes:
        return generate_latest(metrics.registry)

    async def of_all() -> bytes:
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(f"http://{parent}/metrics") as answer,
            ):
                return await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unavailable("the metrics cannot be had") from error

    return of_all if parent else own
