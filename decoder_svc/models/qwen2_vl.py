"""The text model of Qwen2-VL (Wang et al. 2024): Qwen2 with M-RoPE on three axes.

A clip's time counts temporal groups, not seconds; its plans say so (`seconds_per_grid` is 1).
"""

from __future__ import annotations

from typing import Any

from decoder_svc.config.from_hf import TextConfig, read_text
from decoder_svc.models.family import TextFamily


def _read_config(config: dict[str, Any], generation: dict[str, Any]) -> TextConfig:
    return read_text(config, generation, family="qwen2_vl", tokens_per_second=1.0)


FAMILY = TextFamily(_read_config)
