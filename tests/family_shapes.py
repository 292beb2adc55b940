"""Configs of tiny models of every architecture, and their processors' files."""

from __future__ import annotations

import json
from typing import Any

from tests.checkpoints import DEMO


def text_config(demo: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": -(-demo["text_config"]["vocab_size"] // 64) * 64,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "initializer_range": 0.12,
        "bos_token_id": demo["bos_token_id"],
        "eos_token_id": demo["eos_token_id"],
        **changes,
    }


def qwen_ids(demo: dict[str, Any]) -> dict[str, Any]:
    names = ("image", "video", "vision_start", "vision_end")
    return {f"{name}_token_id": demo[f"{name}_token_id"] for name in names}


def glm_ids() -> dict[str, Any]:
    added = json.loads((DEMO / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "image_start_token_id": ids["<|vision_start|>"],
        "image_end_token_id": ids["<|vision_end|>"],
        "video_start_token_id": ids["<|box_start|>"],
        "video_end_token_id": ids["<|box_end|>"],
    }


def qwen3(demo: dict[str, Any], **changes: Any) -> dict[str, Any]:
    rope = {
        "rope_type": "default",
        "mrope_section": [2, 3, 3],
        "mrope_interleaved": True,
        "rope_theta": 5e6,
    }
    return {
        "text_config": text_config(demo, rope_parameters=rope, **changes),
        "vision_config": {
            "depth": 4,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1, 2],
            "patch_size": 16,
            "initializer_range": 0.12,
        },
        **qwen_ids(demo),
    }


def qwen2_5(demo: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}
    return {
        "text_config": text_config(demo, rope_parameters=rope),
        "vision_config": {
            "depth": 4,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1, 3],
            "patch_size": 14,
            "window_size": 56,
            "tokens_per_second": 2,
            "initializer_range": 0.12,
        },
        **qwen_ids(demo),
    }


def qwen2(demo: dict[str, Any]) -> dict[str, Any]:
    made = qwen2_5(demo)
    made["vision_config"] = {
        "depth": 4,
        "embed_dim": 32,
        "hidden_size": 64,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": 14,
        "initializer_range": 0.12,
    }
    return made


def qwen3_moe(demo: dict[str, Any]) -> dict[str, Any]:
    experts = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2}
    return qwen3(demo, **experts)


def glm(demo: dict[str, Any], **changes: Any) -> dict[str, Any]:
    rope = {
        "rope_type": "default",
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.5,
        "rope_theta": 1e4,
    }
    return {
        "text_config": text_config(demo, rope_parameters=rope, **changes),
        "vision_config": {
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 80,
            "num_heads": 2,
            "out_hidden_size": 64,
            "image_size": 56,
            "patch_size": 14,
            "initializer_range": 0.12,
        },
        **glm_ids(),
    }


def glm46(demo: dict[str, Any]) -> dict[str, Any]:
    made = glm(demo)
    made["text_config"]["model_type"] = "glm4v_text"
    made["vision_config"]["model_type"] = "glm4v_vision"
    return made


def glm_moe(demo: dict[str, Any]) -> dict[str, Any]:
    return glm(
        demo,
        moe_intermediate_size=40,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.3,
    )


def intern(demo: dict[str, Any], kind: str = "qwen2", **changes: Any) -> dict[str, Any]:
    text = text_config(demo, model_type=kind, **changes)
    if kind == "qwen2":
        del text["head_dim"]
    return {
        "text_config": text,
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": [56, 56],
            "patch_size": [14, 14],
            "attention_bias": True,
            "initializer_range": 0.12,
        },
        "image_token_id": demo["image_token_id"],
        "image_seq_length": 4,
    }


def intern3(demo: dict[str, Any]) -> dict[str, Any]:
    made = intern(demo, "qwen3")
    made["vision_config"] |= {"use_qk_norm": True, "norm_type": "rms_norm"}
    return made


def intern_llama(demo: dict[str, Any]) -> dict[str, Any]:
    """InternLM2 as transformers has it; two queries to a KV head, several KV heads."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    return intern(demo, "llama", rope_parameters=rope, rms_norm_eps=1e-5, **heads)


def intern3_moe(demo: dict[str, Any]) -> dict[str, Any]:
    experts = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2}
    made = intern3(demo)
    made["text_config"] |= {"model_type": "qwen3_moe", "norm_topk_prob": True, **experts}
    return made


def pixels(kind: str, low: int, high: int, patch: int, **more: Any) -> dict[str, Any]:
    return {
        kind: more.pop("type"),
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "patch_size": patch,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": low, "longest_edge": high},
        **more,
    }
