"""A checkpoint of full size that a whole stack can serve: random weights, a tokenizer that works.

    python -m bench.served_shape DIRECTORY [--small] [--text]

Tokenizer, template and processor files are the demo checkpoint's, filled up to the vocabulary and
set to the family's published sizes. Without `--text` the language model has no weights
(`--load-format dummy`); other layouts of ranks are then other models.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
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
        "vocab_size": 4096,
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


def write_served_shape(directory: Path, *, small: bool = False, text: bool = False) -> Path:
    """Writes Qwen2.5-VL-7B, or a small model of its kind; returns the directory.

    Args:
        directory: Made if it is not there.
        small: For a CPU.
        text: Weights of the language model too: 15 GB, and as much memory for a moment.
    """
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
    draw = _Draw()
    tensors = dict(_tower(config, draw))
    if text:
        tensors |= _language_model(config["text_config"], draw)
    save_file(tensors, directory / "model.safetensors")
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


class _Draw:
    """Random weights in bfloat16, the same every time, made where that is fast."""

    def __init__(self) -> None:
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._generator = torch.Generator(self._device).manual_seed(1)

    def __call__(self, *shape: int, mean: float = 0.0, std: float) -> torch.Tensor:
        weight = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        return weight.normal_(mean, std, generator=self._generator).cpu()


def _tower(config: dict[str, Any], draw: _Draw) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights whose rows stay near one, as those of a trained tower do."""
    with torch.device("meta"):
        tower = Qwen25VisionTower.from_config(config)
    for name, parameter in tower.named_parameters():
        if parameter.dim() > 1:
            weight = draw(*parameter.shape, std=parameter[0].numel() ** -0.5)
        else:
            weight = draw(*parameter.shape, mean=0.5, std=0.2)
        yield f"visual.{name}", weight


def _language_model(text: dict[str, Any], draw: _Draw) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights under which what layers add to the residual stream sums to its own size."""
    width, inner, layers = (
        text[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    keys = width // text["num_attention_heads"] * text["num_key_value_heads"]
    added = (2 * layers) ** -0.5
    yield "model.embed_tokens.weight", draw(text["vocab_size"], width, std=1.0)
    for layer in range(layers):
        name = f"model.layers.{layer}"
        for part, size in (("q", width), ("k", keys), ("v", keys)):
            yield f"{name}.self_attn.{part}_proj.weight", draw(size, width, std=width**-0.5)
            yield f"{name}.self_attn.{part}_proj.bias", draw(size, std=0.1)
        yield f"{name}.self_attn.o_proj.weight", draw(width, width, std=added * width**-0.5)
        for part in ("gate", "up"):
            yield f"{name}.mlp.{part}_proj.weight", draw(inner, width, std=width**-0.5)
        yield f"{name}.mlp.down_proj.weight", draw(width, inner, std=added * inner**-0.5)
        for part in ("input", "post_attention"):
            yield f"{name}.{part}_layernorm.weight", draw(width, mean=1.0, std=0.1)
    yield "model.norm.weight", draw(width, mean=1.0, std=0.1)
    yield "lm_head.weight", draw(text["vocab_size"], width, std=width**-0.5)


def main() -> None:
    """Writes one."""
    parser = argparse.ArgumentParser(prog="python -m bench.served_shape", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--text", action="store_true")
    args = parser.parse_args()
    print(write_served_shape(args.directory, small=args.small, text=args.text))


if __name__ == "__main__":
    main()
