"""InternVL in the layout of its authors, made out of transformers' own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def to_authors_layout(source: Path, target: Path) -> None:
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
