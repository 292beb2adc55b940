"""When the transfers of a request began and ended: for its timeline only, nothing depends on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from decoder_svc.embeddings.events import (
    Broken,
    Fenced,
    FetchCommand,
    FetchEvent,
    Landed,
    Open,
    Quiesced,
    Ready,
)
from decoder_svc.engine.request import Request


class TransferTimes:
    """Knows whose fetch is whose while it runs."""

    def __init__(self) -> None:
        self._owners: dict[bytes, str] = {}

    def opened(self, commands: Sequence[FetchCommand]) -> None:
        """Remembers fetches that are being opened."""
        for command in commands:
            if isinstance(command, Open):
                self._owners[command.fetch_id] = command.request_id

    def note(self, event: FetchEvent, requests: Mapping[str, Request], now: float) -> None:
        """Writes first Ready and last Landed into the request's clock.

        Of rows that were granted before they were ready nothing is heard until they have landed.
        """
        request = requests.get(self._owners.get(event.fetch_id, ""))
        match event:
            case Ready() if request is not None and request.clock.first_ready is None:
                request.clock.first_ready = now
            case Landed() if request is not None:
                request.clock.first_ready = request.clock.first_ready or now
                request.clock.last_landed = now
            case Quiesced() | Broken() | Fenced():
                self._owners.pop(event.fetch_id, None)
