"""Log set-up of every process: stderr, one line per record.

Line breaks inside a message are escaped, so that no request can forge a record. A traceback follows
its record, each line indented by four spaces and a bar.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

LEVELS = ("debug", "info", "warning", "error")


class LineFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO gateway.app: text`, times in UTC."""

    converter = staticmethod(time.gmtime)

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s")
        self.datefmt = "%Y-%m-%dT%H:%M:%S"

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The record's one line."""
        return super().formatMessage(record).replace("\r", "\\r").replace("\n", "\\n")

    def formatException(self, ei: logging._SysExcInfoType) -> str:
        """The traceback, marked as belonging to the line above."""
        return "\n".join(f"    | {line}" for line in super().formatException(ei).splitlines())


def setup_logging(level: str, stream: TextIO | None = None) -> None:
    """Sends all records of `level` and above to `stream` (default: stderr).

    Raises:
        ValueError: `level` is none of `LEVELS`.
    """
    if level not in LEVELS:
        raise ValueError(f"--log-level must be one of {', '.join(LEVELS)}, got {level!r}")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for chatty in ("httpx", "httpcore", "asyncio", "PIL"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLogger().level))
    logging.captureWarnings(True)
