"""Tiny random checkpoints of every architecture that is served, as transformers saves them.

Tokenizer and chat template are the demo checkpoint's, with the family's own special tokens added
where they differ. Norms and biases are drawn too: one that is forgotten is seen.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests import torchvision_ops
from tests.checkpoints import DEMO

torchvision_ops.declare()
import transformers  # noqa: E402

# Special tokens by what the demo tokenizer calls them: ids, and with them the weights, stay small.
_GLM_TOKENS = {
    "<|image_pad|>": "<|image|>",
    "<|video_pad|>": "<|video|>",
    "<|vision_start|>": "<|begin_of_image|>",
    "<|vision_end|>": "<|end_of_image|>",
    "<|box_start|>": "<|begin_of_video|>",
    "<|box_end|>": "<|end_of_video|>",
}
_CLIP_IN_TEMPLATE = "<|vision_start|><|video_pad|><|vision_end|>"
_HALF = [0.5, 0.5, 0.5]
_CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
_CLIP_STD = [0.26862954, 0.26130258, 0.27577711]


@dataclass(frozen=True)
class Family:
    """How one architecture's tiny checkpoint is made."""

    architecture: str
    config: Callable[[dict[str, Any]], dict[str, Any]]
    """From the demo checkpoint's config.json to the arguments of the config class."""
    image: dict[str, Any]
    video: dict[str, Any]
    processor: str
    tokens: Mapping[str, str] = field(default_factory=dict)
    """The family's special tokens, each in place of one of the demo tokenizer's."""
    fills_up: bool = False
    """Whether the reference's frame sampler repeats the last frame of an odd number itself."""
    deepstack: bool = False
    moe: bool = False


def save_tiny(
    name: str, directory: Path | str, *, seed: int = 0, tied: bool = False, **text: Any
) -> Path:
    """Saves a random checkpoint in float32 and returns its directory.

    Args:
        name: A key of `FAMILIES`.
        directory: Where to.
        seed: Of the weights.
        tied: Whether lm_head is the embedding.
        text: Changes to the text config.
    """
    family = FAMILIES[name]
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    demo = json.loads((DEMO / "config.json").read_text())
    arguments = family.config(demo)
    arguments["text_config"].update(text, tie_word_embeddings=tied)
    model_class = getattr(transformers, family.architecture)
    torch.manual_seed(seed)
    model = model_class(model_class.config_class(**arguments, tie_word_embeddings=tied))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                parameter.normal_(std=0.1)
            elif parameter.dim() == 1:
                parameter.normal_(mean=1.0, std=0.2)
            elif not parameter.any():  # routers are born zero
                parameter.normal_(std=0.5)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3)
    model.to(torch.float32).save_pretrained(target)
    _add_processor(family, target)
    return target


def _add_processor(family: Family, target: Path) -> None:
    shutil.copyfile(DEMO / "generation_config.json", target / "generation_config.json")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        text = (DEMO / file).read_text()
        if file.endswith("jinja") and family.tokens:
            text = text.replace(_CLIP_IN_TEMPLATE, "<|box_start|><|video_pad|><|box_end|>")
        for ours, theirs in family.tokens.items():
            text = text.replace(ours, theirs)
        (target / file).write_text(text)
    for file, content in (
        ("preprocessor_config.json", family.image),
        ("video_preprocessor_config.json", family.video),
    ):
        named = {**content, "processor_class": family.processor}
        (target / file).write_text(json.dumps(named))


def _text(demo: dict[str, Any], **changes: Any) -> dict[str, Any]:
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


def _qwen_ids(demo: dict[str, Any]) -> dict[str, Any]:
    names = ("image", "video", "vision_start", "vision_end")
    return {f"{name}_token_id": demo[f"{name}_token_id"] for name in names}


def _glm_ids() -> dict[str, Any]:
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


def _qwen3(demo: dict[str, Any], **changes: Any) -> dict[str, Any]:
    rope = {
        "rope_type": "default",
        "mrope_section": [2, 3, 3],
        "mrope_interleaved": True,
        "rope_theta": 5e6,
    }
    return {
        "text_config": _text(demo, rope_parameters=rope, **changes),
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
        **_qwen_ids(demo),
    }


def _qwen2_5(demo: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}
    return {
        "text_config": _text(demo, rope_parameters=rope),
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
        **_qwen_ids(demo),
    }


def _qwen3_moe(demo: dict[str, Any]) -> dict[str, Any]:
    experts = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2}
    return _qwen3(demo, **experts)


def _glm(demo: dict[str, Any], **changes: Any) -> dict[str, Any]:
    rope = {
        "rope_type": "default",
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.5,
        "rope_theta": 1e4,
    }
    return {
        "text_config": _text(demo, rope_parameters=rope, **changes),
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
        **_glm_ids(),
    }


def _glm46(demo: dict[str, Any]) -> dict[str, Any]:
    made = _glm(demo)
    made["text_config"]["model_type"] = "glm4v_text"
    made["vision_config"]["model_type"] = "glm4v_vision"
    return made


def _glm_moe(demo: dict[str, Any]) -> dict[str, Any]:
    return _glm(
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


def _pixels(kind: str, low: int, high: int, patch: int, **more: Any) -> dict[str, Any]:
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


_QWEN2_IMAGE = _pixels(
    "image_processor_type", 56 * 56, 252 * 252, 14, type="Qwen2VLImageProcessor",
    image_mean=_CLIP_MEAN, image_std=_CLIP_STD,
)  # fmt: skip
_QWEN2_VIDEO = _pixels(
    "video_processor_type", 56 * 56, 168 * 168, 14, type="Qwen2VLVideoProcessor",
    image_mean=_CLIP_MEAN, image_std=_CLIP_STD, fps=2.0, min_frames=4, max_frames=768,
    cap_pixels_per_frame=False,
)  # fmt: skip
_QWEN3_IMAGE = _pixels(
    "image_processor_type", 64 * 64, 256 * 256, 16, type="Qwen2VLImageProcessor",
    image_mean=_HALF, image_std=_HALF,
)  # fmt: skip
_QWEN3_VIDEO = _pixels(
    "video_processor_type", 64 * 64, 400 * 1024, 16, type="Qwen3VLVideoProcessor",
    image_mean=_HALF, image_std=_HALF, cap_pixels_per_frame=False,
)  # fmt: skip

_GLM_IMAGE = _pixels(
    "image_processor_type", 2 * 56 * 56, 2 * 252 * 252, 14, type="Glm4vImageProcessor",
    image_mean=_CLIP_MEAN, image_std=_CLIP_STD,
)  # fmt: skip
_GLM_VIDEO = _pixels(
    "video_processor_type", 112 * 112, 10 * 168 * 168, 14, type="Glm4vVideoProcessor",
    image_mean=_CLIP_MEAN, image_std=_CLIP_STD, fps=2, max_duration=300,
)  # fmt: skip
_GLM46_IMAGE = {**_GLM_IMAGE, "image_processor_type": "Glm46VImageProcessor"}
_GLM46_VIDEO = {**_GLM_VIDEO, "video_processor_type": "Glm46VVideoProcessor"}

FAMILIES: dict[str, Family] = {
    "Qwen2.5-VL": Family(
        "Qwen2_5_VLForConditionalGeneration",
        _qwen2_5,
        _QWEN2_IMAGE,
        _QWEN2_VIDEO,
        "Qwen2_5_VLProcessor",
    ),
    "Qwen3-VL": Family(
        "Qwen3VLForConditionalGeneration",
        _qwen3,
        _QWEN3_IMAGE,
        _QWEN3_VIDEO,
        "Qwen3VLProcessor",
        deepstack=True,
    ),
    "Qwen3-VL MoE": Family(
        "Qwen3VLMoeForConditionalGeneration",
        _qwen3_moe,
        _QWEN3_IMAGE,
        _QWEN3_VIDEO,
        "Qwen3VLProcessor",
        deepstack=True,
        moe=True,
    ),
    "GLM-4.1V": Family(
        "Glm4vForConditionalGeneration",
        _glm,
        _GLM_IMAGE,
        _GLM_VIDEO,
        "Glm4vProcessor",
        _GLM_TOKENS,
        fills_up=True,
    ),
    "GLM-4.5V": Family(
        "Glm4vMoeForConditionalGeneration",
        _glm_moe,
        _GLM_IMAGE,
        _GLM_VIDEO,
        "Glm4vProcessor",
        _GLM_TOKENS,
        fills_up=True,
        moe=True,
    ),
    "GLM-4.6V-Flash": Family(
        "Glm46VForConditionalGeneration",
        _glm46,
        _GLM46_IMAGE,
        _GLM46_VIDEO,
        "Glm46VProcessor",
        _GLM_TOKENS,
        fills_up=True,
    ),
}
