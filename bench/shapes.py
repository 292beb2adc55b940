"""Directories that look like checkpoints of full size, without weights: `--load-format dummy`."""

from __future__ import annotations

import json
from pathlib import Path

QWEN2_5_VL_7B = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "tie_word_embeddings": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "text_config": {
        "model_type": "qwen2_5_vl_text",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-06,
        "use_sliding_window": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000000.0,
            "mrope_section": [16, 24, 24],
        },
    },
    "vision_config": {
        "model_type": "qwen2_5_vl",
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}


def write_shape(directory: Path, *, num_layers: int | None = None) -> Path:
    """Writes config.json of Qwen2.5-VL-7B, or of fewer of its layers; returns the directory."""
    text = dict(QWEN2_5_VL_7B["text_config"])  # type: ignore[call-overload]
    if num_layers is not None:
        text["num_hidden_layers"] = num_layers
    directory.mkdir(parents=True, exist_ok=True)
    config = {**QWEN2_5_VL_7B, "text_config": text}
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return directory
