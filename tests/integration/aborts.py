"""A client that goes away at a chosen stage of its request."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

AFTER_S = {"accept": 0.01, "encode": 0.5, "transfer": 0.15, "decode": 60.0}
"""When a request of each stage is cut off at the latest; in decode, after a few tokens."""
_LEAVES = 0.3  # at each token


class Deserter:
    """Speaks HTTP by hand: a library that is cancelled may keep its connection.

    Args:
        address: The gateway's.
        seed: Of every draw.
    """

    def __init__(self, address: str, *, seed: int) -> None:
        host, port = address.split(":")
        self.cut = dict.fromkeys(AFTER_S, 0)
        """Requests that had not ended when they were left, by stage."""
        self._host, self._port = host, int(port)
        self._draw = random.Random(seed)

    def stages(self, count: int) -> list[str]:
        """As many of each, shuffled."""
        stages = [stage for stage in AFTER_S for _ in range(count // len(AFTER_S))]
        self._draw.shuffle(stages)
        return stages

    async def abort(
        self, request: dict[str, Any], stage: str, *, when: asyncio.Event | None = None
    ) -> None:
        """Sends a streamed request and leaves it: after a while, or when it is told to."""
        task = asyncio.create_task(self._read_some(request, stage))
        if when is not None:
            await when.wait()
        else:
            await asyncio.wait((task,), timeout=AFTER_S[stage] * self._draw.uniform(0.2, 1.0))
        task.cancel()
        (left,) = await asyncio.gather(task, return_exceptions=True)
        self.cut[stage] += isinstance(left, asyncio.CancelledError) or left is True

    async def _read_some(self, request: dict[str, Any], stage: str) -> bool:
        """Whether it left by itself."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            payload = json.dumps(request).encode()
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self._host}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(payload)}\r\n"
                "connection: close\r\n\r\n"
            )
            writer.write(head.encode() + payload)
            while line := await reader.readline():
                if stage == "decode" and b'"content"' in line and self._draw.random() < _LEAVES:
                    return True
            return False
        finally:
            writer.transport.abort()
