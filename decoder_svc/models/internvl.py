"""The text models of InternVL 2.5, 3 and 3.5: Qwen2, Qwen3, Qwen3-MoE or InternLM2 as they are.

InternLM2 (Cai et al. 2024) computes what Llama does; its weights have other names and its q, k and
v lie in one tensor. In transformers' layout it is a Llama. Rows of media have one position each,
like text.
"""

from __future__ import annotations

from typing import Any

from decoder_svc.config.from_hf import ExpertsConfig, TextConfig, need, read_text
from decoder_svc.models.family import TextFamily

_BACKBONES = ("internlm2", "llama", "qwen2", "qwen3", "qwen3_moe")
_WITH_BIAS = "qwen2"  # whatever its config says
_WITH_NORMS = ("qwen3", "qwen3_moe")


def _read_config(config: dict[str, Any], generation: dict[str, Any]) -> TextConfig:
    text = need(config, "text_config")
    kind = text.get("model_type")
    if kind not in _BACKBONES:
        known = ", ".join(_BACKBONES)
        raise ValueError(f"config.json: language model {kind!r} is not supported; known: {known}")
    _refuse_unsupported(text, kind)
    return read_text(
        config,
        generation,
        family="internvl",
        # Frames of a clip are runs of picture placeholders; a clip's own token is never expanded.
        video_token_id=need(config, "image_token_id"),
        qkv_bias=kind == _WITH_BIAS or bool(text.get("attention_bias", False)),
        qk_norm=kind in _WITH_NORMS,
        mrope_section=(),
        spatial_merge_size=round(1 / float(config.get("downsample_ratio", 0.5))),
        experts=_experts(text) if kind == "qwen3_moe" else None,
    )


def _refuse_unsupported(text: dict[str, Any], kind: str) -> None:
    if kind != "internlm2":
        return
    if text.get("bias", True):  # what it means not to say it
        raise ValueError("config.json: bias of InternLM2's attention is not supported")
    positions = text.get("rope_pos_id_version", "default")
    if positions != "default":
        raise ValueError(
            f"config.json: rope_pos_id_version {positions!r} is not supported; known: 'default'"
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
