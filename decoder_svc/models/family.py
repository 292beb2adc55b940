"""What a family of language models says about itself; everything else is shared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from decoder_svc.config.from_hf import TextConfig


@dataclass(frozen=True, slots=True)
class TextFamily:
    """One entry of the registry."""

    read_config: Callable[[dict[str, Any], dict[str, Any]], TextConfig]
    """config.json and generation_config.json to the model's shape. Raises ValueError."""
