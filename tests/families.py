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
from tests.authors_layout import to_authors_layout
from tests.checkpoints import DEMO
from tests.family_shapes import (
    glm,
    glm46,
    glm_moe,
    intern,
    intern3,
    intern3_moe,
    intern_llama,
    pixels,
    qwen2,
    qwen2_5,
    qwen3,
    qwen3_moe,
)

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
    add_processor(family, target)
    if family.native:
        add_processor(family, target / "hf")
        to_authors_layout(target / "hf", target)
    return target


def add_processor(family: Family, target: Path) -> None:
    """Writes everything but config and weights."""
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


_QWEN2_IMAGE = pixels(
    "image_processor_type", 56 * 56, 252 * 252, 14, type="Qwen2VLImageProcessor",
    image_mean=_CLIP_MEAN, image_std=_CLIP_STD,
)  # fmt: skip
_QWEN2_VIDEO = pixels(
    "video_processor_type", 56 * 56, 168 * 168, 14, type="Qwen2VLVideoProcessor",
    image_mean=_CLIP_MEAN, image_std=_CLIP_STD, fps=2.0, min_frames=4, max_frames=768,
    cap_pixels_per_frame=False,
)  # fmt: skip
_QWEN3_IMAGE = pixels(
    "image_processor_type", 64 * 64, 256 * 256, 16, type="Qwen2VLImageProcessor",
    image_mean=_HALF, image_std=_HALF,
)  # fmt: skip
_QWEN3_VIDEO = pixels(
    "video_processor_type", 64 * 64, 400 * 1024, 16, type="Qwen3VLVideoProcessor",
    image_mean=_HALF, image_std=_HALF, cap_pixels_per_frame=False,
)  # fmt: skip

_GLM_IMAGE = pixels(
    "image_processor_type", 2 * 56 * 56, 2 * 252 * 252, 14, type="Glm4vImageProcessor",
    image_mean=_CLIP_MEAN, image_std=_CLIP_STD,
)  # fmt: skip
_GLM_VIDEO = pixels(
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


def _intern(config: Callable[[dict[str, Any]], dict[str, Any]], **more: bool) -> Family:
    return Family(
        "InternVLForConditionalGeneration",
        config,
        _INTERN_IMAGE,
        _INTERN_VIDEO,
        "InternVLProcessor",
        _INTERN_TOKENS,
        _INTERN_SLOTS,
        _INTERN_MORE,
        tiled=True,
        **more,
    )


FAMILIES: dict[str, Family] = {
    "Qwen2-VL": Family(
        "Qwen2VLForConditionalGeneration",
        qwen2,
        _QWEN2_IMAGE,
        _QWEN2_VIDEO,
        "Qwen2VLProcessor",
    ),
    "Qwen2.5-VL": Family(
        "Qwen2_5_VLForConditionalGeneration",
        qwen2_5,
        _QWEN2_IMAGE,
        _QWEN2_VIDEO,
        "Qwen2_5_VLProcessor",
    ),
    "Qwen3-VL": Family(
        "Qwen3VLForConditionalGeneration",
        qwen3,
        _QWEN3_IMAGE,
        _QWEN3_VIDEO,
        "Qwen3VLProcessor",
        deepstack=True,
    ),
    "Qwen3-VL MoE": Family(
        "Qwen3VLMoeForConditionalGeneration",
        qwen3_moe,
        _QWEN3_IMAGE,
        _QWEN3_VIDEO,
        "Qwen3VLProcessor",
        deepstack=True,
        moe=True,
    ),
    "GLM-4.1V": Family(
        "Glm4vForConditionalGeneration",
        glm,
        _GLM_IMAGE,
        _GLM_VIDEO,
        "Glm4vProcessor",
        _GLM_TOKENS,
        _GLM_SLOTS,
        fills_up=True,
    ),
    "GLM-4.5V": Family(
        "Glm4vMoeForConditionalGeneration",
        glm_moe,
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
        glm46,
        _GLM46_IMAGE,
        _GLM46_VIDEO,
        "Glm46VProcessor",
        _GLM_TOKENS,
        _GLM_SLOTS,
        fills_up=True,
    ),
    "InternVL2.5": _intern(intern_llama),
    "InternVL2.5 (authors')": _intern(intern_llama, native=True),
    "InternVL3": _intern(intern),
    "InternVL3 (authors')": _intern(intern, native=True),
    "InternVL3.5": _intern(intern3),
    "InternVL3.5 MoE": _intern(intern3_moe, moe=True),
    "InternVL3.5 MoE (authors')": _intern(intern3_moe, native=True, moe=True),
}
