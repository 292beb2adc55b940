"""Architectures by name. Importing this imports no model."""

from __future__ import annotations

import importlib

from decoder_svc.models.base import StageModel

_ARCHITECTURES = {
    "Qwen2_5_VLForConditionalGeneration": ("decoder_svc.models.qwen2_5_vl", "Qwen25VLStage"),
}


def model_class(architecture: str) -> type[StageModel]:
    """The class of an architecture. Raises ValueError, listing what is known."""
    if architecture not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise ValueError(f"architecture {architecture!r} is not supported; known: {known}")
    module, name = _ARCHITECTURES[architecture]
    found: type[StageModel] = getattr(importlib.import_module(module), name)
    return found
