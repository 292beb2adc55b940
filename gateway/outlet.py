"""A way out for deltas that spares them the layers between the decoder's words and the client.

A task woken, and a generator resumed in each of five layers, cost more than the token they carry.
So while whoever reads a request's events waits for more, deltas leave here at once; everything
else, and deltas too when the client is slow, goes the long way, in order.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.messages import Delta


class Outlet:
    """One request's. Shut until a face has sent the first event and leads it somewhere."""

    def __init__(self) -> None:
        self.tokens = 0
        """How many have left here."""
        self.ready: Callable[[], bool] = _shut
        """Whether a delta would leave now."""
        self._write: Callable[[Delta], None] | None = None
        self._watchers: list[Callable[[Delta], None]] = []

    def lead_to(self, write: Callable[[Delta], None], *, when: Callable[[], bool]) -> None:
        """From a face, once its answer has begun: deltas are written while `when` says so."""
        self._write = write
        self.ready = when

    def watch(self, watcher: Callable[[Delta], None]) -> None:
        """Tells of each delta that leaves here."""
        self._watchers.append(watcher)

    def write(self, delta: Delta) -> None:
        """Only after `ready`, with nothing awaited between."""
        assert self._write is not None, "it was ready"
        self.tokens += len(delta.token_ids)
        for watcher in self._watchers:
            watcher(delta)
        self._write(delta)


def _shut() -> bool:
    return False
