"""A progress bar on stderr that shows itself only when loading takes long."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

QUIET_S = 2.0
"""Loading that takes no longer shows nothing."""


class LoadingBar:
    """Counts bytes. Where there is no terminal, its last state is printed once. Close it.

    Args:
        what: That is being loaded.
        total: Bytes, as far as it is known; may be set later.
    """

    def __init__(self, what: str, *, total: int | None = None) -> None:
        self.total = total
        self._what = what
        self._begun = time.monotonic()
        self._done = 0
        self._bar: Progress | None = None

    def add(self, num_bytes: int) -> None:
        """So much more has been loaded."""
        self._done += num_bytes
        if self._bar is None:
            if time.monotonic() - self._begun < QUIET_S:
                return
            columns = (TextColumn(self._what), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._bar.add_task(self._what, total=self.total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=self._done)

    def close(self) -> None:
        """Leaves the terminal as it was, below the bar."""
        if self._bar is not None:
            self._bar.stop()
