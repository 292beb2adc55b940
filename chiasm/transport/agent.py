"""One NIXL agent and the thread that owns it: registered memory, writes under way, notifications.

NIXL is not thread-safe and moves nothing unless it is polled (its own progress thread would spin
on a core). So one thread makes every call: it polls often while something is expected, and sleeps
otherwise. Knows nothing of fetches.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from chiasm.errors import Unavailable
from chiasm.transport.base import Region, WriteFailed
from chiasm.transport.ucx import apply_ucx_settings

logger = logging.getLogger(__name__)

WRITE_S = 20.0
"""Longest that a write may take before it is aborted: its peer is stopped, or out of reach."""
_PACKAGES = ("nixl_cu13", "nixl_cu12")
_IDLE_S = 0.05
_MISUSE = (RuntimeError, TypeError, UnicodeDecodeError)  # what odd arguments make the binding raise
# While something is expected it polls without a pause at first: most writes are over by then. After
# that the pauses grow with the time waited, so that they add little to it and cost little.
_SPIN_S = 0.0005
_HOLD_S = 0.0002  # and a write just begun is looked at for so long before others may have a turn
# Who has a write begun holds the interpreter's lock and often has more to do: it stands back for
# a moment, or the agent's thread would get the lock only when all of that is done.
_STAND_BACK_S = 1e-6
# A write is over for the peer only when we have looked, once or twice: our pauses are the larger
# part of a small one.
_PAUSE_SHARE, _PAUSE_S = 0.002, (20e-6, 5e-4)


@dataclass(frozen=True, slots=True)
class _Nixl:
    """What is used of the library; see `load_nixl`."""

    agent: Any
    config: Any
    errors: tuple[type[Exception], ...]


def nixl_is_installed() -> bool:
    """Whether there is a NIXL to be tried; loads nothing."""
    return any(importlib.util.find_spec(package) is not None for package in _PACKAGES)


def load_nixl() -> _Nixl:
    """The library for CUDA 13, else the one for CUDA 12; neither needs CUDA. Raises Unavailable."""
    apply_ucx_settings(os.environ)
    missing = ""
    for package in _PACKAGES:
        try:
            api = importlib.import_module(f"{package}._api")
            bindings = importlib.import_module(f"{package}._bindings")
            break
        except ImportError as error:
            missing = missing or str(error)
    else:
        raise Unavailable(f"nixl cannot be used: {missing}")
    names = [name for name in dir(bindings) if name.startswith("nixl") and name.endswith("Error")]
    errors: list[type[Exception]] = [getattr(bindings, name) for name in names]
    logging.getLogger("nixl").setLevel(logging.WARNING)
    return _Nixl(api.nixl_agent, api.nixl_agent_config, (*errors, *_MISUSE))


@dataclass(slots=True, eq=False)
class _Write:
    """A write under way. `handle` is NIXL's."""

    peer: str
    handle: Any
    deadline: float
    over: Future[None]


class TransferAgent:
    """Writes into peers' memory and hears of writes into its own. Methods may be called anywhere.

    Args:
        regions: Registered for as long as the agent lives. The caller keeps the memory.
        on_notices: Gets what peers have notified, in the agent's thread.
        name: Never one twice, in any process.

    Raises:
        Unavailable: NIXL is not installed or cannot start.
    """

    def __init__(
        self,
        regions: Sequence[Region] = (),
        *,
        on_notices: Callable[[list[bytes]], None] = lambda notices: None,
        name: str = "",
    ) -> None:
        self.name = name or f"{secrets.token_hex(8)}.0"
        self.metadata = b""
        self._nixl = load_nixl()
        self._regions = tuple(regions)
        self._on_notices = on_notices
        self._calls: deque[tuple[Callable[[], None], Future[None] | None]] = deque()
        self._wake = threading.Event()
        self._writes: list[_Write] = []
        self._peers: dict[str, bytes] = {}
        self._num_awaited = 0
        self._event_at = 0.0
        self._closing = self._ended = False
        self._agent: Any = None
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="transfer-agent", daemon=True
        )
        self._thread.start()
        started.result()
        atexit.register(self.close)  # a thread inside of NIXL at exit would abort the process

    # From any thread.

    def connect(self, name: str, metadata: bytes) -> Future[None]:
        """Makes a peer's memory known. Fails with WriteFailed."""
        done: Future[None] = Future()
        self._call(lambda: self._connect(name, metadata, done), done)
        return done

    def forget(self, name: str) -> None:
        """Drops a peer; writes to it that are under way fail."""
        self._call(lambda: self._forget(name))

    def write(
        self,
        peer: str,
        source: Sequence[tuple[Region, int, int]],
        target: Sequence[Region],
        notice: bytes,
    ) -> Future[None]:
        """Copies pieces of registered memory into a peer's.

        Args:
            peer: Whom `connect` made known.
            source: (region, offset in it, bytes) of each piece, all regions of one memory type.
            target: Where each goes.
            notice: What the peer hears once every byte is in its memory.

        Returns:
            Done when nothing is written any more, and only then; fails with WriteFailed.
        """
        over: Future[None] = Future()
        is_alone = not self._writes
        self._call(lambda: self._post(peer, source, target, notice, over), over)
        if is_alone:
            time.sleep(_STAND_BACK_S)
        return over

    def await_notices(self, count: int) -> None:
        """So many notifications are expected in all: while there are any, it polls often."""
        self._call(lambda: self._await(count))

    def close(self) -> None:
        """Ends the agent: what peers write from here on fails, connections are gone. Blocks."""
        atexit.unregister(self.close)
        self._closing = True
        self._wake.set()
        self._thread.join()

    # In the agent's own.

    def _call(self, call: Callable[[], None], result: Future[None] | None = None) -> None:
        self._calls.append((call, result))
        self._wake.set()
        if self._ended:
            self._refuse()

    def _refuse(self) -> None:
        while self._calls:
            with suppress(IndexError):  # another thread was faster
                _, result = self._calls.popleft()
                if result is not None and result.set_running_or_notify_cancel():
                    result.set_exception(WriteFailed("the agent is closed", aborted=False))

    def _run(self, started: Future[None]) -> None:
        try:
            self._open()
        except self._nixl.errors as error:
            started.set_exception(Unavailable(f"nixl cannot start: {error}"))
            return
        started.set_result(None)
        while not self._closing:
            while self._calls:
                call, _ = self._calls.popleft()
                call()
                self._event_at = time.monotonic()
            self._progress()
            self._pause()
        self._end()

    def _open(self) -> None:
        config = self._nixl.config(enable_prog_thread=False, backends=["UCX"])
        self._agent = self._nixl.agent(self.name, config)
        for region in self._regions:
            places = [(region.address, region.length, region.device, "")]
            self._agent.register_memory(places, region.memory_type)
        self.metadata = self._agent.get_agent_metadata()

    def _pause(self) -> None:
        if not self._writes and not self._num_awaited:
            self._wake.wait(_IDLE_S)
        elif not self._calls:
            time.sleep(_pause_s(time.monotonic() - self._event_at))
        self._wake.clear()

    def _progress(self) -> None:
        for write in tuple(self._writes):
            self._look_at(write)
        self._hear()

    def _hear(self) -> None:
        try:
            heard = self._agent.get_new_notifs()
        except self._nixl.errors as error:
            logger.warning("notifications cannot be read: %s", error)
            return
        notices = [notice for of_one in heard.values() for notice in of_one]
        if notices:
            self._event_at = time.monotonic()
            self._on_notices(notices)

    def _connect(self, name: str, metadata: bytes, done: Future[None]) -> None:
        if not done.set_running_or_notify_cancel():
            return
        if name in self._peers:
            same = self._peers[name] == metadata
            failure = None if same else "another agent of that name is known"
        else:
            failure = self._introduce(name, metadata)
        if failure is None:
            done.set_result(None)
        else:
            done.set_exception(WriteFailed(failure, aborted=False))

    def _introduce(self, name: str, metadata: bytes) -> str | None:
        """What is wrong with a new peer; None when nothing is."""
        try:
            found = self._agent.add_remote_agent(metadata)
            found = found.decode() if isinstance(found, bytes) else found
            if found != name:
                self._agent.remove_remote_agent(found)
                return f"the metadata are those of agent {found!r}"
            self._agent.make_connection(name)
        except self._nixl.errors as error:
            return str(error)
        self._peers[name] = metadata
        return None

    def _forget(self, name: str) -> None:
        if self._peers.pop(name, None) is not None:
            with suppress(*self._nixl.errors):
                self._agent.remove_remote_agent(name)

    def _await(self, count: int) -> None:
        self._num_awaited = count

    def _post(
        self,
        peer: str,
        source: Sequence[tuple[Region, int, int]],
        target: Sequence[Region],
        notice: bytes,
        over: Future[None],
    ) -> None:
        over.set_running_or_notify_cancel()  # nobody can call it off from here on
        local = [(r.address + offset, length, r.device) for r, offset, length in source]
        remote = [(region.address, region.length, region.device) for region in target]
        try:
            handle = self._agent.initialize_xfer(
                "WRITE",
                self._agent.get_xfer_descs(local, source[0][0].memory_type),
                self._agent.get_xfer_descs(remote, target[0].memory_type),
                peer,
                notice,
            )
        except self._nixl.errors as error:
            over.set_exception(WriteFailed(_words(error), aborted=False))
            return
        write = _Write(peer, handle, time.monotonic() + WRITE_S, over)
        self._writes.append(write)
        try:
            state = self._agent.transfer(handle)
            until = time.monotonic() + _HOLD_S
            while state == "PROC" and time.monotonic() < until:
                state = self._agent.check_xfer_state(handle)
        except self._nixl.errors as error:
            self._fail(write, _words(error))
            return
        self._settle(write, state)

    def _look_at(self, write: _Write) -> None:
        if write not in self._writes:  # failed with another of the same peer
            return
        try:
            state = self._agent.check_xfer_state(write.handle)
        except self._nixl.errors as error:
            self._fail(write, _words(error))
            return
        self._settle(write, state)

    def _settle(self, write: _Write, state: str) -> None:
        if state == "DONE":
            self._event_at = time.monotonic()
            self._drop(write)
            write.over.set_result(None)
        elif state != "PROC":
            self._fail(write, "the transfer failed")
        elif time.monotonic() > write.deadline:
            self._fail(write, f"no end of a write within {WRITE_S:g} s")

    def _fail(self, write: _Write, reason: str) -> None:
        """The connection goes with it, so that nothing more of the write leaves this process."""
        self._drop(write)
        self._forget(write.peer)
        write.over.set_exception(WriteFailed(reason, aborted=True))

    def _drop(self, write: _Write) -> None:
        self._writes.remove(write)
        with suppress(*self._nixl.errors):
            self._agent.release_xfer_handle(write.handle)

    def _end(self) -> None:
        self._hear()
        for write in tuple(self._writes):
            self._fail(write, "the agent is closed")
        for name in tuple(self._peers):
            self._forget(name)
        self._agent = None  # the last reference: its destructor closes every connection
        self._ended = True
        self._refuse()


def _pause_s(quiet_s: float) -> float:
    """How long to sleep when nothing has happened for so long."""
    shortest, longest = _PAUSE_S
    return 0.0 if quiet_s < _SPIN_S else min(longest, max(shortest, _PAUSE_SHARE * quiet_s))


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
