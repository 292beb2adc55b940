"""InternVL in the layout of its authors, made out of transformers' own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def to_authors_layout(source: Path, target: Path) -> None:
    """transformers' InternVL as its authors lay it out."""
    config = json.loads((source / "config.json").read_text())
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
        "llm_config": _text_config(config["text_config"]),
        "vision_config": _vision_config(config["vision_config"]),
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
    if native["llm_config"]["model_type"] == "internlm2":
        tensors = _internlm2(tensors, config["text_config"])
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    template = target / "chat_template.jinja"
    template.write_text(_TEXT_TEMPLATE)


def _text_config(text: dict[str, Any]) -> dict[str, Any]:
    if text["model_type"] != "llama":
        return text
    rope = text.pop("rope_parameters")
    return {
        **text,
        "model_type": "internlm2",
        "bias": False,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    }


def _vision_config(vision: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_size": vision["hidden_size"],
        "intermediate_size": vision["intermediate_size"],
        "num_hidden_layers": vision["num_hidden_layers"],
        "num_attention_heads": vision["num_attention_heads"],
        "image_size": vision["image_size"][0],
        "patch_size": vision["patch_size"][0],
        "qkv_bias": True,
        "qk_normalization": vision["use_qk_norm"],
        "norm_type": vision["norm_type"],
        "layer_norm_eps": vision["layer_norm_eps"],
    }


def _internlm2(tensors: dict[str, torch.Tensor], text: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A Llama under InternLM2's names: for each KV head its queries, then the key, then the value.

    The joint tensor is [KV heads, queries of each + 2, head, hidden] with its first three
    dimensions flattened.
    """
    groups = text["num_key_value_heads"]
    found = {}
    for name, tensor in tensors.items():
        if match := _LLAMA_QKV.fullmatch(name):
            if match[2] == "q":
                parts = [
                    tensors[f"{match[1]}.self_attn.{p}_proj.weight"].unflatten(0, (groups, -1))
                    for p in "qkv"
                ]
                found[f"{match[1]}.attention.wqkv.weight"] = torch.cat(parts, dim=1).flatten(0, 1)
            continue
        found[_renamed(name, _INTERNLM2_NAMES)] = tensor
    return found


def _native_name(name: str) -> str:
    return _renamed(name, _NATIVE_NAMES)


def _renamed(name: str, words: Iterable[tuple[str, str]]) -> str:
    for theirs, authors in words:
        name = name.replace(theirs, authors)
    return name


_QKV = re.compile(r"(.*)\.attention\.([qkv])_proj\.(weight|bias)")
_LLAMA_QKV = re.compile(r"(.*)\.self_attn\.([qkv])_proj\.weight")
_INTERNLM2_NAMES = (
    ("model.embed_tokens", "model.tok_embeddings"),
    ("self_attn.o_proj", "attention.wo"),
    ("mlp.gate_proj", "feed_forward.w1"),
    ("mlp.up_proj", "feed_forward.w3"),
    ("mlp.down_proj", "feed_forward.w2"),
    ("input_layernorm", "attention_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("language_model.lm_head", "language_model.output"),
)
_NATIVE_NAMES = (
    ("vision_tower.", "vision_model."),
    ("encoder.layer.", "encoder.layers."),
    ("embeddings.cls_token", "embeddings.class_embedding"),
    ("position_embeddings", "position_embedding"),
    ("patch_embeddings.projection", "patch_embedding"),
    ("attention.projection_layer", "attn.proj"),
    ("attention.q_norm", "attn.q_norm"),
    ("attention.k_norm", "attn.k_norm"),
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
