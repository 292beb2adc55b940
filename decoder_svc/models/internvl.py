"""The text models of InternVL 2.5, 3 and 3.5: Qwen2, Qwen3 or Qwen3-MoE as they are.

Rows of media have one position each, like text.
"""

from __future__ import annotations

from typing import Any

from decoder_svc.config.from_hf import ExpertsConfig, TextConfig, need, read_text
from decoder_svc.models.family import TextFamily

_BACKBONES = ("qwen2", "qwen3", "qwen3_moe")


def _read_config(config: dict[str, Any], generation: dict[str, Any]) -> TextConfig:
    text = need(config, "text_config")
    kind = text.get("model_type")
    if kind not in _BACKBONES:
        known = ", ".join(_BACKBONES)
        raise ValueError(f"config.json: language model {kind!r} is not supported; known: {known}")
    qwen2 = kind == "qwen2"
    return read_text(
        config,
        generation,
        family="internvl",
        # Frames of a clip are runs of picture placeholders; a clip's own token is never expanded.
        video_token_id=need(config, "image_token_id"),
        qkv_bias=qwen2 or bool(text.get("attention_bias", False)),
        qk_norm=not qwen2,
        mrope_section=(),
        spatial_merge_size=round(1 / float(config.get("downsample_ratio", 0.5))),
        experts=_experts(text) if kind == "qwen3_moe" else None,
    )


def _experts(text: dict[str, Any]) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=text.get("num_experts") or need(text, "num_local_experts"),
        top_k=need(text, "num_experts_per_tok"),
        intermediate_size=need(text, "moe_intermediate_size"),
        dense_layers=frozenset(text.get("mlp_only_layers") or ()),
        normalize=bool(text.get("norm_topk_prob", False)),
    )


FAMILY = TextFamily(_read_config)
