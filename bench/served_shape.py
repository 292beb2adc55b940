"""A checkpoint of full size that a whole stack can serve: random weights, a tokenizer that works.

Tokenizer, template and processor files are the demo checkpoint's, filled up to the vocabulary and
set to the family's published sizes. The language model has no weights (`--load-format dummy`).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.shapes import QWEN2_5_VL_7B
from encoder_svc.models.qwen2_5_vl import Qwen25VisionTower

DEMO = Path(__file__).parent.parent / "chiasm" / "demo" / "checkpoint"
_COPIED = ("chat_template.jinja", "generation_config.json", "tokenizer_config.json")
_CELL = 28 * 28
_IMAGE_PIXELS = (4 * _CELL, 16384 * _CELL)
_FRAME_PIXELS = (128 * _CELL, 768 * _CELL)
SMALL: dict[str, dict[str, Any]] = {
    "text_config": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 90,
        "num_heads": 2,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [1],
    },
}
"""What differs in a model that a CPU can serve."""


def write_served_shape(directory: Path, *, small: bool = False) -> Path:
    """Writes Qwen2.5-VL-7B, or a small model of its kind; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    config = _config(small)
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    for name in _COPIED:
        shutil.copyfile(DEMO / name, directory / name)
    _write_tokenizer(directory, config["text_config"]["vocab_size"])
    for name, (least, most) in (
        ("preprocessor_config.json", _IMAGE_PIXELS),
        ("video_preprocessor_config.json", _FRAME_PIXELS),
    ):
        settings = json.loads((DEMO / name).read_text(encoding="utf-8"))
        settings |= {"min_pixels": least, "max_pixels": most}
        settings["size"] = {"shortest_edge": least, "longest_edge": most}
        if name.startswith("video"):
            settings["cap_pixels_per_frame"] = True
        (directory / name).write_text(json.dumps(settings), encoding="utf-8")
    _write_tower(directory, config)
    return directory


def _config(small: bool) -> dict[str, Any]:
    demo = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))
    special = {name: value for name, value in demo.items() if name.endswith("token_id")}
    config: dict[str, Any] = {**QWEN2_5_VL_7B, **special}
    for part, changes in SMALL.items() if small else ():
        config[part] = config[part] | changes
    if small:
        rope = config["text_config"]["rope_parameters"]
        config["text_config"]["rope_parameters"] = rope | {"mrope_section": [2, 3, 3]}
    return config


def _write_tokenizer(directory: Path, size: int) -> None:
    """Every id has a text; those that the demo's tokenizer lacks come out of no text."""
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary.update({token["content"]: token["id"] for token in tokenizer["added_tokens"]})
    used = set(vocabulary.values())
    vocabulary.update({f"<{index}>": index for index in range(size) if index not in used})
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


def _write_tower(directory: Path, config: dict[str, Any]) -> None:
    """Weights whose rows stay near one, as those of a trained tower do."""
    with torch.device("meta"):
        tower = Qwen25VisionTower.from_config(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(1)
    tensors = {}
    for name, parameter in tower.named_parameters():
        weight = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
        if weight.dim() > 1:
            weight.normal_(std=weight[0].numel() ** -0.5, generator=generator)
        else:
            weight.normal_(mean=0.5, std=0.2, generator=generator)
        tensors[f"visual.{name}"] = weight.cpu()
    save_file(tensors, directory / "model.safetensors")
