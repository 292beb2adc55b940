"""What people see while services run: prefixed log lines and a sign of life during waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from rich.console import Console
from rich.text import Text

QUIET_S = 2.0

_STYLES = ("cyan", "magenta", "green", "yellow", "blue")


class LogPrinter:
    """Prints `name | line`, one colour per name; usable as a supervisor's relay."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._styles: dict[str, str] = {}

    def __call__(self, name: str, line: str) -> None:
        """Prints one line of that name."""
        style = self._styles.setdefault(name, _STYLES[len(self._styles) % len(_STYLES)])
        self._console.print(Text(f"{name:<10}| ", style).append(line, "default"), soft_wrap=True)


@asynccontextmanager
async def sign_of_life(console: Console, text: Callable[[], str]) -> AsyncIterator[None]:
    """Inside, shows `text()` and the seconds passed once two seconds have gone by."""
    task = asyncio.create_task(_show(console, text))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _show(console: Console, text: Callable[[], str]) -> None:
    begin = time.monotonic()
    await asyncio.sleep(QUIET_S)
    if not console.is_terminal:
        while True:
            console.print(f"{text()} ({time.monotonic() - begin:.0f} s)", highlight=False)
            await asyncio.sleep(10.0)
    with console.status(text()) as status:
        while True:
            status.update(f"{text()} ({time.monotonic() - begin:.0f} s)")
            await asyncio.sleep(0.25)
