"""Keeps a set of child processes running: restarts what dies, ends all in order.

Knows nothing of what the children do; one that dies says so and does not take the others along.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from chiasm.process.child import Child, DidNotStart, describe_exit

BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
HEALTHY_AFTER_S = 60.0
SUPERVISOR = "chiasm"
"""The name under which a supervisor itself speaks."""

Relay = Callable[[str, str], None]  # (name, line)
Watch = Callable[[str, Mapping[str, str] | None], None]  # (name, ready line; None: it has ended)


@dataclass(frozen=True, slots=True)
class Spec:
    """How a child is started.

    Attributes:
        name: What people call it.
        command: Program and arguments.
        pinned: Flag by field of the ready line. A restart listens where the first start did, so
            that peers find it again: the port of the field's host:port replaces the flag's value.
        stop_order: Children of the lowest order are ended first, and waited for.
    """

    name: str
    command: tuple[str, ...]
    pinned: Mapping[str, str] = field(default_factory=dict)
    stop_order: int = 0


class _Member:
    """A spec, its present child and its history."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.child: Child | None = None
        self.ports: dict[str, str] = {}
        self.restarts = 0
        self.keeper: asyncio.Task[None] | None = None

    def command(self) -> tuple[str, ...]:
        """The command with the ports of the first start."""
        words = list(self.spec.command)
        for flag, port in self.ports.items():
            words[words.index(flag) + 1] = port
        return tuple(words)


class Supervisor:
    """Owns every child it launched until `stop` returns.

    Args:
        relay: Gets every line of every child, and the supervisor's own under the name `SUPERVISOR`.
        stop_s: Seconds children get to drain before they are killed.
        watch: Told of every child that has become ready, and of every end of one.
    """

    def __init__(
        self, relay: Relay, *, stop_s: float = 35.0, watch: Watch = lambda name, ready: None
    ) -> None:
        self._relay = relay
        self._stop_s = stop_s
        self._watch = watch
        self._members: list[_Member] = []
        self._stopping = asyncio.Event()

    @property
    def waiting_for(self) -> tuple[str, ...]:
        """Names of children that have not been ready yet."""
        return tuple(m.spec.name for m in self._members if m.keeper is None)

    def pids(self) -> Mapping[str, int]:
        """Process ids by name."""
        return {m.spec.name: m.child.pid for m in self._members if m.child is not None}

    def last_lines(self, name: str) -> Sequence[str]:
        """The latest output of a child."""
        return next(
            tuple(m.child.last_lines) for m in self._members if m.spec.name == name and m.child
        )

    async def launch(self, spec: Spec) -> Mapping[str, str]:
        """Starts a child, waits until it is ready, watches it from then on.

        Returns:
            The fields of its ready line.

        Raises:
            DidNotStart: It ended before it was ready.
        """
        member = _Member(spec)
        self._members.append(member)
        ready = await self._start(member)
        member.ports = {
            flag: ready[key].rpartition(":")[2] for key, flag in spec.pinned.items() if key in ready
        }
        member.keeper = asyncio.create_task(self._keep(member))
        return ready

    async def stop(self) -> None:
        """Ends every child: SIGTERM by `stop_order`, time to drain, SIGKILL."""
        self._stopping.set()
        for order in sorted({m.spec.stop_order for m in self._members}):
            group = [m for m in self._members if m.spec.stop_order == order]
            await asyncio.gather(*(self._end(m) for m in group))

    def kill(self) -> None:
        """Kills every child at once."""
        self._stopping.set()
        for member in self._members:
            if member.child is not None:
                member.child.signal_group(signal.SIGKILL)

    async def _start(self, member: _Member) -> Mapping[str, str]:
        name = member.spec.name
        child = Child(name, member.command(), relay=lambda line: self._relay(name, line))
        await child.start()
        member.child = child
        if self._stopping.is_set():
            child.terminate()
        ready = await child.ready()
        self._watch(name, ready)
        return ready

    async def _keep(self, member: _Member) -> None:
        while True:
            assert member.child is not None
            started = time.monotonic()
            code = await member.child.wait()
            self._watch(member.spec.name, None)
            if self._stopping.is_set():
                return
            if time.monotonic() - started > HEALTHY_AFTER_S:
                member.restarts = 0
            delay = BACKOFF_S[min(member.restarts, len(BACKOFF_S) - 1)]
            member.restarts += 1
            self._say(
                f"{member.spec.name} died unexpectedly ({describe_exit(code)}); "
                f"starting it again in {delay:g} s"
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)
            if self._stopping.is_set():
                return
            with contextlib.suppress(DidNotStart):  # then the loop sees its exit code
                await self._start(member)
                self._say(f"{member.spec.name} is back")

    async def _end(self, member: _Member) -> None:
        child = member.child
        if child is None:
            return
        child.terminate()
        try:
            await asyncio.wait_for(child.wait(), self._stop_s)
        except TimeoutError:
            self._say(f"{member.spec.name} did not end within {self._stop_s:g} s; killing it")
            child.signal_group(signal.SIGKILL)
            await child.wait()
        if member.keeper is not None:
            await member.keeper

    def _say(self, text: str) -> None:
        self._relay(SUPERVISOR, text)
