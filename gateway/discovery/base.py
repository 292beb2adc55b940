"""Where addresses come from."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class PeerRole(StrEnum):
    """The two kinds of peer a gateway talks to."""

    ENCODER = "encoder"
    DECODER = "decoder"


@dataclass(frozen=True, slots=True)
class Peer:
    """An address to try. Who answers there is asked, never assumed."""

    role: PeerRole
    address: str


class Discovery(Protocol):
    """A source of addresses."""

    def watch(self) -> AsyncIterator[frozenset[Peer]]:
        """Yields the full set at once, and again whenever it changes."""
        ...
