"""Tiny random checkpoints of every architecture that is served, as transformers saves them.

Tokenizer and chat template are the demo checkpoint's, with the family's own special tokens added
where they differ. Norms and biases are drawn too: one that is forgotten is seen.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

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
_SLOTS = tuple(f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video"))
_GLM_SLOTS = ("", "<|box_start|><|video_pad|><|box_end|>")
_INTERN_TOKENS = {
    "<|image_pad|>": "<IMG_CONTEXT>",
    "<|video_pad|>": "<video>",
    "<|vision_start|>": "<img>",
    "<|vision_end|>": "</img>",
}
_INTERN_SLOTS = (r"<|image_pad|>\n", r"<|video_pad|>\n")
_INTERN_MORE = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
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
    slots: tuple[str, str] = ("", "")
    """How the family's templates mark a picture and a clip, where that is not Qwen's way."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of tokenizer_config.json and processor_config.json."""
    tiled: bool = False
    native: bool = False
    """Saved in the layout of InternVL's authors; transformers' own lies beside it, in hf/."""
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
    model.to(torch.float32).save_pretrained(target / "hf" if family.native else target)
    _add_processor(family, target)
    if family.native:
        _add_processor(family, target / "hf")
        _to_authors_layout(target / "hf", target)
    return target


def _to_authors_layout(source: Path, target: Path) -> None:
    """transformers' InternVL as its authors lay it out."""
    config = json.loads((source / "config.json").read_text())
    vision = config["vision_config"]
    native = {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "downsample_ratio": 0.5,
        "dynamic_image_size": True,
        "max_dynamic_patch": 12,
        "min_dynamic_patch": 1,
        "use_thumbnail": True,
        "ps_version": "v2",
        "select_layer": -1,
        "tie_word_embeddings": False,
        "llm_config": {**config["text_config"], "architectures": ["Qwen2ForCausalLM"]},
        "vision_config": {
            "hidden_size": vision["hidden_size"],
            "intermediate_size": vision["intermediate_size"],
            "num_hidden_layers": vision["num_hidden_layers"],
            "num_attention_heads": vision["num_attention_heads"],
            "image_size": vision["image_size"][0],
            "patch_size": vision["patch_size"][0],
            "qkv_bias": True,
            "qk_normalization": False,
            "norm_type": "layer_norm",
            "layer_norm_eps": vision["layer_norm_eps"],
        },
    }
    (target / "config.json").write_text(json.dumps(native))
    stored = load_file(source / "model.safetensors")
    tensors = {}
    for name, tensor in stored.items():
        if match := _QKV.fullmatch(name):
            if match[2] == "q":
                parts = (stored[f"{match[1]}.attention.{p}_proj.{match[3]}"] for p in "qkv")
                tensors[f"{_native_name(match[1])}.attn.qkv.{match[3]}"] = torch.cat([*parts])
        else:
            tensors[_native_name(name)] = tensor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    template = target / "chat_template.jinja"
    template.write_text(_TEXT_TEMPLATE)


def _native_name(name: str) -> str:
    for theirs, authors in _NATIVE_NAMES:
        name = name.replace(theirs, authors)
    return name


_QKV = re.compile(r"(.*)\.attention\.([qkv])_proj\.(weight|bias)")
_NATIVE_NAMES = (
    ("vision_tower.", "vision_model."),
    ("encoder.layer.", "encoder.layers."),
    ("embeddings.cls_token", "embeddings.class_embedding"),
    ("position_embeddings", "position_embedding"),
    ("patch_embeddings.projection", "patch_embedding"),
    ("attention.projection_layer", "attn.proj"),
    ("layernorm_before", "norm1"),
    ("layernorm_after", "norm2"),
    ("lambda_", "ls"),
    ("multi_modal_projector.layer_norm", "mlp1.0"),
    ("multi_modal_projector.linear_1", "mlp1.1"),
    ("multi_modal_projector.linear_2", "mlp1.3"),
)
# A template that takes text only, as older checkpoints of the authors' layout have it.
_TEXT_TEMPLATE = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant."
    "<|im_end|>\n{% endif %}{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def _add_processor(family: Family, target: Path) -> None:
    shutil.copyfile(DEMO / "generation_config.json", target / "generation_config.json")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        text = (DEMO / file).read_text()
        if file.endswith("jinja"):
            for ours, theirs in zip(_SLOTS, family.slots, strict=True):
                text = text.replace(ours, theirs or ours)
        for ours, theirs in family.tokens.items():
            text = text.replace(ours, theirs)
        (target / file).write_text(text)
    if family.more:
        path = target / "tokenizer_config.json"
        path.write_text(
            json.dumps({**json.loads(path.read_text()), "extra_special_tokens": family.more})
        )
        sizes = {"processor_class": family.processor, "image_seq_length": 4}
        (target / "processor_config.json").write_text(json.dumps(sizes))
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


def _qwen2(demo: dict[str, Any]) -> dict[str, Any]:
    made = _qwen2_5(demo)
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


def _intern(demo: dict[str, Any], kind: str = "qwen2", **changes: Any) -> dict[str, Any]:
    text = _text(demo, model_type=kind, **changes)
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


def _intern3(demo: dict[str, Any]) -> dict[str, Any]:
    made = _intern(demo, "qwen3")
    made["vision_config"] |= {"use_qk_norm": True, "norm_type": "rms_norm"}
    return made


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

_TILE = {"height": 56, "width": 56}
_INTERN_IMAGE = {
    "image_processor_type": "GotOcr2ImageProcessor",
    "crop_to_patches": True,
    "max_patches": 12,
    "min_patches": 1,
    "size": _TILE,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "resample": 3,
}
_INTERN_VIDEO = {**_INTERN_IMAGE, "num_frames": 8}
del _INTERN_VIDEO["image_processor_type"], _INTERN_VIDEO["crop_to_patches"]
_INTERN_VIDEO["video_processor_type"] = "InternVLVideoProcessor"

FAMILIES: dict[str, Family] = {
    "Qwen2-VL": Family(
        "Qwen2VLForConditionalGeneration",
        _qwen2,
        _QWEN2_IMAGE,
        _QWEN2_VIDEO,
        "Qwen2VLProcessor",
    ),
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
        _GLM_SLOTS,
        fills_up=True,
    ),
    "GLM-4.5V": Family(
        "Glm4vMoeForConditionalGeneration",
        _glm_moe,
        _GLM_IMAGE,
        _GLM_VIDEO,
        "Glm4vProcessor",
        _GLM_TOKENS,
        _GLM_SLOTS,
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
        _GLM_SLOTS,
        fills_up=True,
    ),
    "InternVL3": Family(
        "InternVLForConditionalGeneration",
        _intern,
        _INTERN_IMAGE,
        _INTERN_VIDEO,
        "InternVLProcessor",
        _INTERN_TOKENS,
        _INTERN_SLOTS,
        _INTERN_MORE,
        tiled=True,
    ),
    "InternVL3.5": Family(
        "InternVLForConditionalGeneration",
        _intern3,
        _INTERN_IMAGE,
        _INTERN_VIDEO,
        "InternVLProcessor",
        _INTERN_TOKENS,
        _INTERN_SLOTS,
        _INTERN_MORE,
        tiled=True,
    ),
    "InternVL3 (authors')": Family(
        "InternVLForConditionalGeneration",
        _intern,
        _INTERN_IMAGE,
        _INTERN_VIDEO,
        "InternVLProcessor",
        _INTERN_TOKENS,
        _INTERN_SLOTS,
        _INTERN_MORE,
        tiled=True,
        native=True,
    ),
}
