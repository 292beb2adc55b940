"""The Fetch streams of this process: which may open, which wait for an Encode, which are fenced."""

from __future__ import annotations

from collections import OrderedDict

from chiasm.plan import Cause
from chiasm.rows import RowFormat
from encoder_svc.fetch_session import FetchOpening, FetchSession, SessionState
from encoder_svc.store import EmbeddingStore

_MAX_FENCED = 1 << 16


class FetchTable:
    """Joins Fetch streams to entries. Policy only.

    Args:
        store: The entries.
        epoch: This life of the process; a fetch meant for another is refused.
        row_format: What rows look like here; a decoder built for others is refused.
    """

    def __init__(
        self,
        store: EmbeddingStore,
        *,
        epoch: int,
        row_format: RowFormat,
    ) -> None:
        self._store = store
        self._epoch = epoch
        self._row_format = row_format
        self._sessions: dict[bytes, FetchSession] = {}  # that have not ended
        self._fenced: OrderedDict[bytes, None] = OrderedDict()

    def open(
        self, opening: FetchOpening, *, memory_types: tuple[str, ...] | None = ()
    ) -> FetchSession:
        """A session for a new Fetch stream; a refused one has ended already, and says why.

        Args:
            opening: What it asks for.
            memory_types: Which memory of its decoder can be written; see `FetchSession`.
        """
        session = FetchSession(opening, memory_types=memory_types)
        session.on_end.append(lambda: self._session_ended(session))
        refusal = self._refusal(opening)
        if refusal is not None:
            session.fail(Cause.LOST, refusal)
            return session
        self._sessions[opening.fetch_id] = session
        self._join(session)
        return session

    def encode_began(self, encode_id: bytes) -> None:
        """An Encode stream was admitted: fetches that came before it go on."""
        for session in tuple(self._sessions.values()):
            if session.opening.encode_id == encode_id:
                self._join(session)

    def fence(self, fetch_id: bytes) -> FetchSession | None:
        """Stops a fetch and refuses its id for ever.

        Returns:
            The session to wait for until it has ended; None when nothing can be written already.
        """
        self._fenced[fetch_id] = None
        if len(self._fenced) > _MAX_FENCED:
            self._fenced.popitem(last=False)
        session = self._sessions.get(fetch_id)
        if session is not None:
            session.cancel()
        return None if session is None or session.ended else session

    @property
    def num_open(self) -> int:
        """Fetches that have not ended."""
        return len(self._sessions)

    def check(self) -> None:
        """Raises AssertionError when a session has no interest, or interest no session."""
        for fetch_id, session in self._sessions.items():
            session.check()
            assert not session.ended
            assert session.entry is None or fetch_id in session.entry.fetches
            assert session.entry is None or session.state is not SessionState.WAITING
        attached = sum(s.entry is not None for s in self._sessions.values())
        assert self._store.num_fetches == attached, "interest differs from the open Fetch streams"

    def _refusal(self, opening: FetchOpening) -> str | None:
        if self._is_other_life(opening.encoder_epoch):
            return "another life of this encoder was meant"
        if opening.fetch_id in self._fenced:
            return "this fetch was fenced off"
        if opening.fetch_id in self._sessions:
            return "this fetch id is in use"
        if opening.format != self._row_format:
            return f"rows here are {self._row_format}, {opening.format} were asked for"
        if self._store.has_ended(opening.encode_id):
            return "the encode has ended"
        return None

    def _is_other_life(self, epoch: int) -> bool:
        return epoch not in (0, self._epoch)

    def _join(self, session: FetchSession) -> None:
        entry = self._store.find(session.opening.encode_id)
        if entry is None or session.state is not SessionState.WAITING:
            return
        session.attach(entry)
        if session.entry is not None:
            fetch_id = session.opening.fetch_id
            self._store.open_fetch(entry, fetch_id, has_grants=session.has_grants)
            entry.watchers.append(session.refresh)
            session.accept(self._epoch)

    def _session_ended(self, session: FetchSession) -> None:
        fetch_id = session.opening.fetch_id
        if self._sessions.get(fetch_id) is session:
            del self._sessions[fetch_id]
        if session.entry is not None:
            session.entry.watchers.remove(session.refresh)
            self._store.end_fetch(session.entry, fetch_id)
