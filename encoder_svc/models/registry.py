"""Vision towers by architecture, imported when first asked for."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from encoder_svc.models.base import VisionTower

_TOWERS = {
    "Qwen2_5_VLForConditionalGeneration": ("encoder_svc.models.qwen2_5_vl", "Qwen25VisionTower"),
}


def tower_class(architecture: str) -> type[VisionTower]:
    """Raises ValueError naming the architectures this build knows."""
    if architecture not in _TOWERS:
        raise ValueError(
            f"no vision tower for architecture {architecture!r}; known: {', '.join(_TOWERS)}"
        )
    module, name = _TOWERS[architecture]
    found: type[VisionTower] = getattr(import_module(module), name)
    return found


def read_config(model_dir: Path) -> dict[str, Any]:
    """The checkpoint's config.json. Raises ValueError when it is no JSON object."""
    try:
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"cannot read {model_dir / 'config.json'}: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{model_dir / 'config.json'} is not a JSON object")
    return config


def architecture_of(config: dict[str, Any]) -> str:
    """The first of a checkpoint's `architectures`."""
    names = config.get("architectures") or [""]
    return str(names[0])
