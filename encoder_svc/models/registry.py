"""Vision towers by architecture, imported when first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from encoder_svc.models.base import VisionTower

_TOWERS = {
    "InternVLChatModel": ("encoder_svc.models.internvl", "InternVisionTower"),
    "InternVLForConditionalGeneration": ("encoder_svc.models.internvl", "InternVisionTower"),
    "Glm46VForConditionalGeneration": ("encoder_svc.models.glm4v", "Glm4vVisionTower"),
    "Glm4vForConditionalGeneration": ("encoder_svc.models.glm4v", "Glm4vVisionTower"),
    "Glm4vMoeForConditionalGeneration": ("encoder_svc.models.glm4v", "Glm4vVisionTower"),
    "Qwen2VLForConditionalGeneration": ("encoder_svc.models.qwen2_vl", "Qwen2VisionTower"),
    "Qwen2_5_VLForConditionalGeneration": ("encoder_svc.models.qwen2_5_vl", "Qwen25VisionTower"),
    "Qwen3VLForConditionalGeneration": ("encoder_svc.models.qwen3_vl", "Qwen3VisionTower"),
    "Qwen3VLMoeForConditionalGeneration": ("encoder_svc.models.qwen3_vl", "Qwen3VisionTower"),
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


def architecture_of(config: dict[str, Any]) -> str:
    """The first of a checkpoint's `architectures`."""
    names = config.get("architectures") or [""]
    return str(names[0])
