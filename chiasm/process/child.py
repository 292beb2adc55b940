"""One child process: its output line by line, its ready line, its end.

A child never outlives this process: it leads its own process group, which is killed with it, and
the kernel kills it when its parent dies, however that happens (`chiasm.process.lifeline`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio import StreamReader
from asyncio.subprocess import Process
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chiasm.process import lifeline

READY_PREFIX = "chiasm-ready "
KEPT_LINES = 40

_LONGEST_LINE = 1 << 20
_LAST_WORDS_S = 2.0


class DidNotStart(Exception):
    """A child ended before it was ready; the message is one sentence, with its last words."""


class Child:
    """A process that prints one `chiasm-ready key=value ...` line when it serves.

    Args:
        name: What people call it, such as `encoder-0`.
        command: Program and arguments.
        relay: Called with every line of stdout and stderr, without its line break.
    """

    def __init__(self, name: str, command: Sequence[str], *, relay: Callable[[str], None]) -> None:
        self.name = name
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._command = tuple(command)
        self._relay = relay
        self._ready: asyncio.Future[Mapping[str, str]] | None = None
        self._process: Process | None = None
        self._end: asyncio.Task[int] | None = None

    @property
    def pid(self) -> int:
        """Process id; also the id of its process group."""
        assert self._process is not None, "not started"
        return self._process.pid

    async def start(self) -> None:
        """Starts the process; does not wait until it is ready."""
        self._ready = asyncio.get_running_loop().create_future()
        # Pipes of our own: with asyncio's, waiting for the process would also wait for whatever it
        # started and left behind holding them.
        out, err = await _open_pipe(), await _open_pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", lifeline.__file__, str(os.getpid()), *self._command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out.write_fd,
                stderr=err.write_fd,
                start_new_session=True,  # a Ctrl-C reaches us alone; we end children in order
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        finally:
            os.close(out.write_fd)
            os.close(err.write_fd)
        self._end = asyncio.create_task(self._watch(self._process, (out, err)))

    async def ready(self) -> Mapping[str, str]:
        """The fields of the ready line.

        Raises:
            DidNotStart: The process ended first.
        """
        assert self._ready is not None and self._end is not None, "not started"
        either: set[asyncio.Future[Any]] = {self._ready, self._end}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._ready.done():
            return self._ready.result()
        code = self._end.result()
        reason = self.last_lines[-1] if self.last_lines else "it said nothing"
        raise DidNotStart(f"{self.name} did not start ({describe_exit(code)}): {reason}")

    async def wait(self) -> int:
        """Exit code once the process has ended and all its output is relayed; -N for signal N."""
        assert self._end is not None, "not started"
        return await asyncio.shield(self._end)

    def terminate(self) -> None:
        """Asks the process to drain and end."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    def signal_group(self, number: signal.Signals) -> None:
        """Signals the process and everything it started."""
        with contextlib.suppress(ProcessLookupError):  # all gone
            os.killpg(self.pid, number)

    async def _watch(self, process: Process, pipes: Sequence[_Pipe]) -> int:
        readers = [asyncio.create_task(self._read(pipe.reader)) for pipe in pipes]
        code = await process.wait()
        self.signal_group(signal.SIGKILL)  # what it left behind, and what would hold the pipes
        _, stuck = await asyncio.wait(readers, timeout=_LAST_WORDS_S)
        for reader in stuck:  # somebody who left the group still holds the pipe
            reader.cancel()
        for pipe in pipes:
            pipe.transport.close()
        return code

    async def _read(self, stream: StreamReader) -> None:
        assert self._ready is not None
        async for line in _lines(stream):
            if line.startswith(READY_PREFIX) and not self._ready.done():
                pairs = (word.partition("=") for word in line.removeprefix(READY_PREFIX).split())
                self._ready.set_result({key: value for key, _, value in pairs})
            self.last_lines.append(line)
            self._relay(line)


def describe_exit(code: int) -> str:
    """`exit code 1` or `killed by SIGKILL`."""
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


@dataclass(frozen=True, slots=True)
class _Pipe:
    reader: StreamReader
    transport: asyncio.ReadTransport
    write_fd: int


async def _open_pipe() -> _Pipe:
    loop = asyncio.get_running_loop()
    reader = StreamReader()
    read_fd, write_fd = os.pipe()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb", buffering=0)
    )
    return _Pipe(reader, transport, write_fd)


async def _lines(stream: StreamReader) -> AsyncIterator[str]:
    """Lines without their breaks; an endless line is cut, not refused."""
    rest = b""
    while data := await stream.read(65536):
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line.decode("utf-8", "replace").rstrip("\r")
        if len(rest) > _LONGEST_LINE:
            yield rest.decode("utf-8", "replace")
            rest = b""
    if rest:
        yield rest.decode("utf-8", "replace")
