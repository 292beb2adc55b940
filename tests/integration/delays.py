"""What the services of a test wait for: seconds by name, in a file that may change at any time."""

from __future__ import annotations

import json
import os
from pathlib import Path

VARIABLE = "SERVICE_DELAYS"
"""Names the file in the environment of the services."""


def write(path: Path, seconds: dict[str, float]) -> None:
    """At once: no reader sees half a file."""
    path.with_suffix(".new").write_text(json.dumps(seconds))
    path.with_suffix(".new").replace(path)


def read() -> dict[str, float]:
    """As the file says now."""
    return dict(json.loads(Path(os.environ[VARIABLE]).read_text()))
