"""Families at the size of their public checkpoints: configs, processor files, tokenizer.

Sizes are those of Qwen3-VL-8B and -30B-A3B, InternVL3-8B (-HF layout) and GLM-4.1V-9B. Special
tokens have the demo tokenizer's ids, which it takes no download to have.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.families import FAMILIES
from tests.family_shapes import glm_ids, qwen_ids

Sizes = dict[str, Any]


@dataclass(frozen=True)
class FullSize:
    """A checkpoint's shape."""

    family: str
    """A key of `tests.families.FAMILIES`, which knows its processor files."""
    text: Sizes
    vision: Sizes
    ids: Callable[[Sizes], Sizes]
    small: tuple[Sizes, Sizes]
    """What to change for a rehearsal on a CPU: fewer layers, narrower."""
    image: Sizes
    """Entries of preprocessor_config.json that follow from the size."""

    @property
    def architecture(self) -> str:
        """The class in transformers."""
        return FAMILIES[self.family].architecture

    def arguments(self, demo: Sizes, *, small: bool = False) -> Sizes:
        """Of the config class."""
        eos = {key: demo[key] for key in ("bos_token_id", "eos_token_id")}
        changes = self.small if small else ({}, {})
        text, vision = self.text | eos | changes[0], self.vision | changes[1]
        shape: Sizes = {"text_config": text, "vision_config": vision, **self.ids(demo)}
        return {**shape, "tie_word_embeddings": False}


def add_vocabulary(directory: Path, size: int) -> None:
    """Fills tokenizer.json up with tokens that no text yields, so that every id has a text."""
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    # Ids of added tokens that the vocabulary lacks would be given anew, behind all others.
    vocabulary.update({token["content"]: token["id"] for token in tokenizer["added_tokens"]})
    used = set(vocabulary.values())
    vocabulary.update({f"<{index}>": index for index in range(size) if index not in used})
    path.write_text(json.dumps(tokenizer))


def _qwen3_text(**sizes: Any) -> Sizes:
    rope = {
        "rope_type": "default",
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
        "rope_theta": 5e6,
    }
    common = {"vocab_size": 151936, "head_dim": 128, "num_attention_heads": 32}
    more = {"max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "rope_parameters": rope}
    return common | more | sizes


_QWEN3_VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
    "patch_size": 16,
}
_SMALL_QWEN3 = (
    {
        "num_hidden_layers": 4,
        "vocab_size": 4096,
        "hidden_size": 256,
        "head_dim": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
    },
    {
        "depth": 4,
        "deepstack_visual_indexes": [0, 1, 2],
        "hidden_size": 144,
        "num_heads": 2,
        "intermediate_size": 320,
        "out_hidden_size": 256,
    },
)
_QWEN3_IMAGE = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}

SHAPES = {
    "Qwen3-VL-8B": FullSize(
        "Qwen3-VL",
        _qwen3_text(
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=36,
            num_key_value_heads=8,
        ),
        _QWEN3_VISION | {"out_hidden_size": 4096},
        qwen_ids,
        _SMALL_QWEN3,
        _QWEN3_IMAGE,
    ),
    "Qwen3-VL-30B-A3B": FullSize(
        "Qwen3-VL MoE",
        _qwen3_text(
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            num_hidden_layers=48,
            num_key_value_heads=4,
        ),
        _QWEN3_VISION | {"out_hidden_size": 2048},
        qwen_ids,
        (_SMALL_QWEN3[0] | {"moe_intermediate_size": 96, "num_experts": 32}, _SMALL_QWEN3[1]),
        _QWEN3_IMAGE,
    ),
    "InternVL3-8B": FullSize(
        "InternVL3",
        {
            "model_type": "qwen2",
            "vocab_size": 151674,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
        {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "image_size": [448, 448],
            "patch_size": [14, 14],
            "attention_bias": True,
        },
        lambda demo: {"image_token_id": demo["image_token_id"], "image_seq_length": 256},
        (
            {
                "num_hidden_layers": 4,
                "vocab_size": 4096,
                "hidden_size": 256,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 512,
            },
            {
                "num_hidden_layers": 3,
                "hidden_size": 128,
                "num_attention_heads": 2,
                "intermediate_size": 256,
            },
        ),
        {"size": {"height": 448, "width": 448}},
    ),
    "GLM-4.1V-9B": FullSize(
        "GLM-4.1V",
        {
            "vocab_size": 151552,
            "hidden_size": 4096,
            "intermediate_size": 13696,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "max_position_embeddings": 65536,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [8, 12, 12],
                "partial_rotary_factor": 0.5,
                "rope_theta": 1e4,
            },
        },
        {
            "depth": 24,
            "hidden_size": 1536,
            "intermediate_size": 13696,
            "num_heads": 12,
            "out_hidden_size": 4096,
            "image_size": 336,
            "patch_size": 14,
        },
        lambda demo: glm_ids(),
        (
            {
                "num_hidden_layers": 4,
                "vocab_size": 4096,
                "hidden_size": 512,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 512,
            },
            {
                "depth": 3,
                "hidden_size": 128,
                "num_heads": 2,
                "intermediate_size": 512,
                "out_hidden_size": 512,
            },
        ),
        {"size": {"shortest_edge": 12544, "longest_edge": 9633792}},
    ),
}
