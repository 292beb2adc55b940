"""How much may wait for the engine: pages that prompts will fill, bytes of rows they will fetch.

What is refused here has been started nowhere: another decoder may be asked at once. Policy: no
tensors, no network. How many requests wait is counted by the engine's client.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from chiasm.config.decoder import MemoryConfig, SchedulerConfig
from chiasm.errors import ResourceExhausted
from decoder_svc.engine.messages import AddRequest, ChoiceDone, Event, ItemReleased, Tokens

RETRY_AFTER_S = 1.0
_FILLS = 8  # times that what waits may fill pages and slab, unless it is said


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """For what has not begun to answer. One request alone may be larger than all of it."""

    pages: int
    """Of K and V."""
    embedding_bytes: int
    block_size: int
    """Tokens of a page."""
    row_bytes: int


BOUNDLESS = Room(pages=sys.maxsize, embedding_bytes=sys.maxsize, block_size=1, row_bytes=1)


def room_of(limits: SchedulerConfig, memory: MemoryConfig, *, pages: int, row_bytes: int) -> Room:
    """As the settings say; 0 = several times what there is memory for."""
    return Room(
        pages=-(-limits.max_waiting_tokens // memory.block_size) or _FILLS * pages,
        embedding_bytes=limits.max_waiting_embedding_bytes or _FILLS * memory.slab_bytes,
        block_size=memory.block_size,
        row_bytes=row_bytes,
    )


class Place:
    """One request's share of the room, given back bit by bit as the engine gets on with it."""

    def __init__(self, admission: Admission, pages: int, items: dict[int, int]) -> None:
        self._admission = admission
        self._pages = pages
        self._items = items

    def heard(self, event: Event) -> None:
        """The engine says something of the request."""
        if isinstance(event, ItemReleased):
            self._give_back(0, self._items.pop(event.item, 0))
        elif isinstance(event, Tokens | ChoiceDone):
            self._begin()

    def leave(self) -> None:
        """It is over. Idempotent."""
        self._begin()
        while self._items:
            self._give_back(0, self._items.popitem()[1])

    def _begin(self) -> None:
        pages, self._pages = self._pages, 0
        self._give_back(pages, 0)

    def _give_back(self, pages: int, embedding_bytes: int) -> None:
        self._admission.waiting_pages -= pages
        self._admission.waiting_bytes -= embedding_bytes


class Admission:
    """Lets requests wait while there is room.

    Args:
        room: How much.
    """

    def __init__(self, room: Room) -> None:
        self.waiting_pages = 0
        self.waiting_bytes = 0
        self._room = room

    def enter(self, request: AddRequest) -> Place:
        """Counts a request. Raises ResourceExhausted, before anything is counted."""
        room = self._room
        tokens = len(request.prompt_ids) + sum(map(len, request.resume))
        pages = -(-tokens // room.block_size)
        items = {p.item: p.plan.num_rows * room.row_bytes for p in request.promises}
        embedding_bytes = sum(items.values())
        _refuse(self.waiting_pages, pages, room.pages, "KV pages")
        _refuse(self.waiting_bytes, embedding_bytes, room.embedding_bytes, "bytes of embeddings")
        self.waiting_pages += pages
        self.waiting_bytes += embedding_bytes
        return Place(self, pages, items)

    def check(self) -> None:
        """Nothing is given back twice."""
        assert self.waiting_pages >= 0 and self.waiting_bytes >= 0


def _refuse(waiting: int, more: int, room: int, what: str) -> None:
    if waiting and more and waiting + more > room:
        raise ResourceExhausted(
            f"requests that need {waiting} {what} are waiting already",
            retry_after_s=RETRY_AFTER_S,
        )
