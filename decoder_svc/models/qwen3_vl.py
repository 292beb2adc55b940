"""The text model of Qwen3-VL, dense and MoE (Bai et al. 2025).

Queries and keys are normalised, time, height and width take turns among the rotary frequencies, and
the first layers add the encoder's deeper features to rows of media.
"""

from __future__ import annotations

from typing import Any

from decoder_svc.config.from_hf import ExpertsConfig, TextConfig, need, read_text
from decoder_svc.models.family import TextFamily


def _read_config(config: dict[str, Any], generation: dict[str, Any]) -> TextConfig:
    text, vision = config.get("text_config") or {}, config.get("vision_config") or {}
    return read_text(
        config,
        generation,
        family="qwen3_vl",
        qkv_bias=bool(text.get("attention_bias", False)),
        qk_norm=True,
        deepstack_levels=len(vision.get("deepstack_visual_indexes") or ()),
        experts=_experts(text),
    )


def _experts(text: dict[str, Any]) -> ExpertsConfig | None:
    count = text.get("num_experts") or text.get("num_local_experts")  # as hubs and as saves have it
    if not count:
        return None
    step = text.get("decoder_sparse_step") or 1
    dense = {i for i in range(need(text, "num_hidden_layers")) if (i + 1) % step}
    return ExpertsConfig(
        num_experts=count,
        top_k=need(text, "num_experts_per_tok"),
        intermediate_size=need(text, "moe_intermediate_size"),
        dense_layers=frozenset(dense | set(text.get("mlp_only_layers") or ())),
    )


FAMILY = TextFamily(_read_config)
