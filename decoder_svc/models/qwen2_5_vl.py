"""The text model of Qwen2.5-VL (Bai et al. 2025): Qwen2.5 with M-RoPE on three axes."""

from __future__ import annotations

from typing import Any

from decoder_svc.config.from_hf import TextConfig, read_text
from decoder_svc.models.family import TextFamily


def _read_config(config: dict[str, Any], generation: dict[str, Any]) -> TextConfig:
    return read_text(config, generation, family="qwen2_5_vl")


FAMILY = TextFamily(_read_config)
