"""JSON files of a checkpoint, read with errors that a user can act on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The JSON object in a file; with `optional`, an empty one where there is no such file.

    Raises:
        ValueError: No such file, no JSON, or not an object.
    """
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ValueError(f"{path.parent} has no {path.name} that can be read") from None
    except ValueError as error:  # not UTF-8, or not JSON
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    return value
