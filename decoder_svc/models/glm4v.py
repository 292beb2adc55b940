"""The text models of GLM-4.1V and GLM-4.6V-Flash (dense), and of GLM-4.5V and GLM-4.6V (MoE).

Half of each head turns. The dense models turn neighbouring elements together and normalise what
attention and feed-forward give; the others choose experts by corrected sigmoids, beside experts
that every token passes through.
"""

from __future__ import annotations

from typing import Any

from decoder_svc.config.from_hf import ExpertsConfig, TextConfig, masked_tokens, need, read_text
from decoder_svc.models.family import TextFamily


def _read_config(config: dict[str, Any], generation: dict[str, Any]) -> TextConfig:
    text = config.get("text_config") or config
    experts = _experts(text)
    return read_text(
        config,
        generation,
        family="glm4v",
        rms_eps=text.get("rms_norm_eps", 1e-5),
        # Frames of a clip are runs of image placeholders; the clip's own token is never expanded.
        video_token_id=need(config, "image_token_id"),
        masked_token_ids=masked_tokens(
            config, "image_start", "image_end", "video_start", "video_end"
        ),
        qkv_bias=bool(text.get("attention_bias", True)),
        rotary_pairs=experts is None,
        sandwich_norms=experts is None,
        experts=experts,
    )


def _experts(text: dict[str, Any]) -> ExpertsConfig | None:
    count = text.get("n_routed_experts") or text.get("num_local_experts")
    if not count:
        return None
    width = need(text, "moe_intermediate_size")
    return ExpertsConfig(
        num_experts=count,
        top_k=need(text, "num_experts_per_tok"),
        intermediate_size=width,
        shared_size=width * int(text.get("n_shared_experts") or 0),
        dense_layers=frozenset(range(int(text.get("first_k_dense_replace", 1)))),
        sigmoid=True,
        num_groups=int(text.get("n_group") or 1),
        top_groups=int(text.get("topk_group") or 1),
        normalize=bool(text.get("norm_topk_prob", True)),
        scale=float(text.get("routed_scaling_factor") or 1.0),
    )


FAMILY = TextFamily(_read_config)
