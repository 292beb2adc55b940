"""Tiny random checkpoints in hub layout, made on the spot, for unit, parity and integration tests.

Tokenizer, chat template and processor files are the demo checkpoint's: a gateway can serve these.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from tests import torchvision_ops

torchvision_ops.declare()
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration  # noqa: E402

DEMO = Path(__file__).resolve().parent.parent / "chiasm" / "demo" / "checkpoint"
_COPIED = (
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
)
_SPECIAL = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
)


def save_tiny_qwen(
    directory: Path | str, *, tied: bool = True, kv_heads: int = 2, seed: int = 0
) -> Path:
    """Saves a random Qwen2.5-VL of 4 text and 4 vision blocks in float32 and returns its directory.

    The vocabulary is the demo tokenizer's, padded to a multiple of 64: ids above the tokenizer's
    exist in the weights only, as in the family's real checkpoints.
    """
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    demo = json.loads((DEMO / "config.json").read_text())
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config=_text(demo, tied=tied, kv_heads=kv_heads),
            vision_config=_vision(),
            tie_word_embeddings=tied,
            **{key: demo[key] for key in _SPECIAL},
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zero at init: a forgotten bias would go unseen
                parameter.normal_(std=0.1)
    model.to(torch.float32).save_pretrained(target)
    for name in _COPIED:
        shutil.copyfile(DEMO / name, target / name)
    return target


def _text(demo: dict[str, Any], *, tied: bool, kv_heads: int) -> dict[str, Any]:
    return {
        "vocab_size": -(-demo["text_config"]["vocab_size"] // 64) * 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 4096,
        "initializer_range": 0.12,
        "tie_word_embeddings": tied,
        "bos_token_id": demo["bos_token_id"],
        "eos_token_id": demo["eos_token_id"],
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [2, 3, 3],
            "rope_theta": 10000.0,
        },
    }


def _vision() -> dict[str, Any]:
    return {
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [1, 3],
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 56,
        "initializer_range": 0.12,
    }
