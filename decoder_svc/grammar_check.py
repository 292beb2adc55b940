"""Whether a request's grammar can be: tried in a process that may die of it, within a time limit.

Runs on the event loop. What passes is compiled once more here, in a thread, so that the
engine finds it ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from chiasm.errors import InvalidRequest, ResourceExhausted
from chiasm.process import lifeline
from chiasm.v1 import decoder_pb2
from decoder_svc.sampling.grammar import GrammarCompiler, source_of

NUM_TRIERS = 2
_QUEUE_S = 1.0  # longest wait for a trier; it ends by itself after CPU_S of work on one grammar
_TRIAL_S = 10.0  # longest trial, on a machine that is too busy to give a trier its CPU_S
_KEPT = 256  # verdicts
_MODULE = "decoder_svc.sampling.grammar_trial"


@dataclass(slots=True)
class _Trier:
    process: Process | None = None

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None


class GrammarCheck:
    """Checks grammars; `close` ends its processes.

    Args:
        compiler: Compiles what has passed.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._idle: asyncio.Queue[_Trier] = asyncio.Queue()
        self._triers = [_Trier() for _ in range(NUM_TRIERS)]
        for trier in self._triers:
            self._idle.put_nowait(trier)
        self._verdicts: OrderedDict[str, str] = OrderedDict()  # "" = it passed
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Reads the tokenizer and starts the processes, so that the first request need not wait."""
        if self._compiler.available:
            self._do(self._load())

    async def check(self, grammar: decoder_pb2.Grammar) -> str:
        """The grammar as sampling takes it; empty for none.

        Raises:
            InvalidRequest: It cannot be, or is too complex; `param` is the message's own.
            ResourceExhausted: Too many grammars are being tried.
        """
        kind = grammar.WhichOneof("kind")
        if kind is None:
            return ""
        try:
            return await self._check(kind, getattr(grammar, kind))
        except ValueError as error:
            param = grammar.param or "grammar"
            raise InvalidRequest(f"{param} cannot be obeyed: {error}", param=param) from None

    async def close(self) -> None:
        """Ends what runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for trier in self._triers:
            await _end(trier)

    async def _check(self, kind: str, text: str) -> str:
        if not self._compiler.available:
            raise ValueError("this decoder has no grammar library, or its checkpoint no tokenizer")
        source = source_of(kind, text)
        verdict = self._verdicts.get(source)
        if verdict is None:
            verdict = await self._try(source)
            self._verdicts[source] = verdict
            while len(self._verdicts) > _KEPT:
                self._verdicts.popitem(last=False)
        if verdict:
            raise ValueError(verdict)
        await asyncio.to_thread(self._compiler.compile, source)
        return source

    async def _try(self, source: str) -> str:
        """What is wrong with the grammar; empty when nothing is."""
        try:
            async with asyncio.timeout(_QUEUE_S):
                trier = await self._idle.get()
        except TimeoutError:
            raise ResourceExhausted(
                "too many grammars are being compiled; nothing was started", retry_after_s=1.0
            ) from None
        line = b""
        try:
            async with asyncio.timeout(_TRIAL_S):
                line = await self._ask(trier, source)
        except TimeoutError:
            pass
        finally:
            if line:
                self._idle.put_nowait(trier)
            else:
                self._do(self._renew(trier))
        return (json.loads(line) or "") if line else "it is too complex"

    async def _ask(self, trier: _Trier, source: str) -> bytes:
        """A line, or nothing when the trier has died of it."""
        process = trier.process if trier.alive else None
        if process is None:
            process = await self._spawn(trier)
        assert process.stdin is not None and process.stdout is not None
        body = source.encode()
        process.stdin.write(len(body).to_bytes(4, "big") + body)
        with contextlib.suppress(ConnectionError):
            await process.stdin.drain()
        return await process.stdout.readline()

    async def _renew(self, trier: _Trier) -> None:
        await _end(trier)
        try:
            await self._spawn(trier)
        finally:
            self._idle.put_nowait(trier)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _spawn(self, trier: _Trier) -> Process:
        lifelined = (sys.executable, "-I", "-S", lifeline.__file__, str(os.getpid()))
        program = (sys.executable, "-m", _MODULE, str(self._compiler.vocab_size))
        trier.process = await asyncio.create_subprocess_exec(
            *lifelined, *program, stdin=PIPE, stdout=PIPE, limit=1 << 20, start_new_session=True
        )
        return trier.process

    async def _load(self) -> None:
        await asyncio.to_thread(self._compiler.load)
        for _ in self._triers:
            trier = await self._idle.get()
            try:
                if not trier.alive:
                    await self._spawn(trier)
            finally:
                self._idle.put_nowait(trier)


async def _end(trier: _Trier) -> None:
    process, trier.process = trier.process, None
    if process is not None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
