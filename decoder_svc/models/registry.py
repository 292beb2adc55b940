"""Architectures by name. Importing this imports no model."""

from __future__ import annotations

import importlib

from decoder_svc.models.family import TextFamily

_FAMILIES = {
    "Glm46VForConditionalGeneration": "decoder_svc.models.glm4v",
    "Glm4vForConditionalGeneration": "decoder_svc.models.glm4v",
    "Glm4vMoeForConditionalGeneration": "decoder_svc.models.glm4v",
    "InternVLChatModel": "decoder_svc.models.internvl",
    "InternVLForConditionalGeneration": "decoder_svc.models.internvl",
    "Qwen2VLForConditionalGeneration": "decoder_svc.models.qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "decoder_svc.models.qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "decoder_svc.models.qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "decoder_svc.models.qwen3_vl",
}


def family_of(architecture: str) -> TextFamily:
    """The family of an architecture. Raises ValueError, listing what is known."""
    if architecture not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise ValueError(f"architecture {architecture!r} is not supported; known: {known}")
    found: TextFamily = importlib.import_module(_FAMILIES[architecture]).FAMILY
    return found
