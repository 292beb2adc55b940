"""What towers of native resolution read alike in a checkpoint's `vision_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def read_sizes(vision: Mapping[str, Any], *names: str) -> dict[str, int]:
    """The sizes of these names. Raises ValueError naming the first that is missing."""
    try:
        return {name: int(vision[name]) for name in names}
    except KeyError as error:
        raise ValueError(f"vision_config: {error.args[0]} is missing") from None


def read_rope_theta(vision: Mapping[str, Any]) -> float:
    """The base of the rotary angles."""
    rope = vision.get("rope_parameters") or {}
    return float(rope.get("rope_theta", 10000.0))


def check_activation(vision: Mapping[str, Any], ours: str) -> None:
    """Raises ValueError when `hidden_act` names another one than the tower's."""
    if (act := vision.get("hidden_act", ours)) != ours:
        raise ValueError(f"vision_config: hidden_act {act!r} is not supported")
