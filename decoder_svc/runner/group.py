"""One life of a decoder's ranks, from the engine's side: channels, what came over them, the end."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from decoder_svc.engine.messages import StepResult
from decoder_svc.runner.codec import Alive, Failed, Message, Ready, Start, decode, encode
from decoder_svc.runner.executor import RanksLost

_SILENCE_S = 20.0  # a stopped process; one that computes goes on saying that it lives
_LOADING_SILENCE_S = 300.0  # reading weights may hold the interpreter
_SEND_S = 10
_END_S = 5.0


@dataclass(eq=False)
class Member:
    """A rank as the engine knows it; `process` is None when it runs on another host."""

    rank: int
    channel: Connection
    process: BaseProcess | None
    heard_at: float = 0.0
    num_blocks: int | None = None
    most_rows: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" (pid {self.process.pid})" if self.process else "")


class RankGroup:
    """Talks to all ranks; never waits longer than it is told to. Used by the engine's thread alone.

    Args:
        members: By rank.
        start: What every rank is told first.
        clock: Seconds, monotonic.

    Raises:
        RanksLost: One has gone already; the group is ended.
    """

    def __init__(
        self,
        members: Sequence[Member],
        start: Start,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.results: deque[StepResult] = deque()
        self.faulty_settings = ""
        """Why a rank refused to start, when trying again cannot help."""
        self._members = tuple(members)
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        for member in self._members:
            member.heard_at = clock()
            _bound_sends(member.channel)
            self._selector.register(member.channel, selectors.EVENT_READ, member)
        try:
            self.send(start)
        except RanksLost:
            self.end()
            raise

    @property
    def ready(self) -> bool:
        """Whether every rank has loaded."""
        return all(member.num_blocks is not None for member in self._members)

    @property
    def num_blocks(self) -> int:
        """Pages of K and V, the same on every rank."""
        assert self.ready, "asked before the ranks have loaded"
        return min(member.num_blocks or 0 for member in self._members)

    @property
    def most_rows(self) -> int:
        """Sequences of a decode step that may be told in columns."""
        return min(member.most_rows for member in self._members)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of this machine's ranks."""
        processes = [member.process for member in self._members]
        return tuple(p.pid for p in processes if p is not None and p.pid is not None)

    def send(self, message: Message) -> None:
        """One message to every rank, encoded once. Raises RanksLost."""
        frame = encode(message)
        for member in self._members:
            try:
                member.channel.send_bytes(frame)
            except OSError:  # gone, or it has stopped reading
                raise RanksLost(f"{member} does not listen{self._last_words(member)}") from None

    def listen(self, timeout_s: float) -> None:
        """Takes in what has been said, waiting at most so long for the first word.

        Raises:
            RanksLost: A rank has gone, has failed, or has been silent for too long.
        """
        for key, _ in self._selector.select(timeout_s):
            self._hear(key.data)
        limit = self._clock() - (_SILENCE_S if self.ready else _LOADING_SILENCE_S)
        for member in self._members:
            if member.heard_at < limit and not member.channel.poll():
                raise RanksLost(f"{member} has fallen silent")

    def end(self) -> None:
        """Ends every rank at once; on other hosts they end as their channel closes."""
        self._selector.close()
        for member in self._members:
            if member.process is not None:
                member.process.kill()
            member.channel.close()
        for member in self._members:
            if member.process is not None:
                member.process.join(_END_S)

    def _hear(self, member: Member) -> None:
        try:
            message = decode(member.channel.recv_bytes())
        except (EOFError, OSError):
            raise RanksLost(f"{member} has died{self._last_words(member)}") from None
        member.heard_at = self._clock()
        match message:
            case StepResult():
                self.results.append(message)
            case Ready(num_blocks, most_rows):
                member.num_blocks, member.most_rows = num_blocks, most_rows
            case Failed(text, is_users):
                self.faulty_settings = text if is_users and not self.ready else ""
                raise RanksLost(f"{member} failed: {text}")
            case Alive():
                pass
            case _:
                raise RanksLost(f"{member} said what no rank says")

    def _last_words(self, member: Member) -> str:
        """Its exit code, once there is one."""
        if member.process is None:
            return ""
        with contextlib.suppress(AssertionError):  # not this process's child any more
            member.process.join(0.2)
        code = member.process.exitcode
        return "" if code is None else f", exit code {code}"


def _bound_sends(channel: Connection) -> None:
    """A rank that reads no more must not hold the engine up for ever once its buffer is full."""
    with socket.socket(fileno=os.dup(channel.fileno())) as same:
        limit = struct.pack("@ll", _SEND_S, 0)
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
