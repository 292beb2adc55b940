"""What the services of a test wait for: seconds by name, in a file that may change at any time.

A wait that has begun heeds the file as well: `HOLD` stops a service in the middle of its work until
the test lets it go, so that nothing depends on how long anything takes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

VARIABLE = "SERVICE_DELAYS"
"""Names the file in the environment of the services."""
HOLD = 3600.0
"""Seconds: until told otherwise."""
_GLANCE_S = 0.02


def write(path: Path, seconds: dict[str, float]) -> None:
    """At once: no reader sees half a file."""
    path.with_suffix(".new").write_text(json.dumps(seconds))
    path.with_suffix(".new").replace(path)


def read() -> dict[str, float]:
    """As the file says now."""
    return dict(json.loads(Path(os.environ[VARIABLE]).read_text()))


def wait(seconds: Callable[[dict[str, float]], float]) -> None:
    """Waits as long as this makes of the file, which may change meanwhile."""
    began = time.monotonic()
    while (left := began + seconds(read()) - time.monotonic()) > 0:
        time.sleep(min(left, _GLANCE_S))
