"""What crosses the seams between embedding receiver, engine and fetcher: frozen values."""

from __future__ import annotations

from dataclasses import dataclass

from chiasm.plan import Cause, Source, Span
from chiasm.rows import RowFormat
from chiasm.transport.base import HOST_BANK, Destination


@dataclass(frozen=True, slots=True)
class Demand:
    """Rows that the engine will want soon. Lists of demands are in admission order.

    An empty span keeps the place of a request that will want rows later only.
    """

    request_id: str
    item: int
    rows: Span


@dataclass(frozen=True, slots=True)
class SlabRun:
    """Consecutive rows of the slab; those of its second bank follow those of the first."""

    first_slab_row: int
    num_rows: int


# Events: fetcher -> receiver.


@dataclass(frozen=True, slots=True)
class Accepted:
    """The encoder knows the entry; rows will become ready.

    `segments` are the rows of its segments by number, when they may be granted before they are:
    the encoder writes each as soon as it can, and may say no Ready.
    """

    fetch_id: bytes
    segments: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Ready:
    """A segment can be granted: its rows of the item, and what a row looks like."""

    fetch_id: bytes
    segment: int
    rows: Span
    format: RowFormat


@dataclass(frozen=True, slots=True)
class Landed:
    """The bytes of one grant are in a bank of the slab, and the encoder said Written.

    They are sound: the checksum agrees, or, of rows that were written straight into our memory,
    the receiving rank has been notified.
    """

    fetch_id: bytes
    segment: int
    seq: int
    bank: int = HOST_BANK


@dataclass(frozen=True, slots=True)
class Failed:
    """The encoder, or a check on our side, gave the fetch up. Quiesced or Broken still follows."""

    fetch_id: bytes
    cause: Cause
    message: str


@dataclass(frozen=True, slots=True)
class Quiesced:
    """The encoder has stopped writing for this fetch, for good."""

    fetch_id: bytes


@dataclass(frozen=True, slots=True)
class Broken:
    """The stream ended without Quiesced: the encoder may still be writing."""

    fetch_id: bytes


@dataclass(frozen=True, slots=True)
class Fenced:
    """The answer to a `Fence` command: nothing of that fetch is written any more."""

    fetch_id: bytes


FetchEvent = Accepted | Ready | Landed | Failed | Quiesced | Broken | Fenced


# Commands: receiver -> fetcher, in order.


@dataclass(frozen=True, slots=True)
class Open:
    """Open a Fetch stream for the rows of one part."""

    fetch_id: bytes
    request_id: str
    item: int
    part: int
    digest: bytes
    rows: Span
    source: Source
    attempt: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Let the encoder write rows of one segment; `seq` counts the grants of the fetch from 1."""

    fetch_id: bytes
    segment: int
    seq: int
    destinations: tuple[Destination, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a fetch; it is over when Quiesced (or Broken, then Fenced) comes back."""

    fetch_id: bytes


@dataclass(frozen=True, slots=True)
class Fence:
    """Ask until it is certain that nothing of a broken fetch is written any more."""

    fetch_id: bytes
    endpoint: str
    epoch: int


FetchCommand = Open | Grant | Cancel | Fence


# Notices: receiver -> engine.


@dataclass(frozen=True, slots=True)
class ItemLanded:
    """No row of the item is needed from any encoder any more."""

    request_id: str
    item: int


@dataclass(frozen=True, slots=True)
class PartLost:
    """The rows of a part will not come from any source it has; once per attempt."""

    request_id: str
    item: int
    part: int
    attempt: int
    cause: Cause
    message: str


Notice = ItemLanded | PartLost
