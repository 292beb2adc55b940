"""Turns a checkpoint's config.json into a frozen TextConfig: the one place that knows the dialects.

Dialects: text settings nested in `text_config` or at the top level; rope settings in
`rope_parameters`, in `rope_scaling`, or beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chiasm.checkpoint import read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """The language model's shape and the token ids it treats specially."""

    architecture: str
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    mrope_section: tuple[int, ...]
    """Rotary frequencies that follow time, height and width, in this order; head_dim / 2 in all."""
    max_positions: int
    tied: bool
    """lm_head is the token embedding."""
    eos_token_ids: tuple[int, ...]
    image_token_id: int
    video_token_id: int
    masked_token_ids: tuple[int, ...]
    """Never sampled: ids that only the prompt may hold."""
    spatial_merge_size: int
    tokens_per_second: float
    deepstack_levels: int = 0
    """Layers that add features of deeper encoder layers to rows of media, from the first on."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"config.json: {self.num_heads} heads over {self.num_kv_heads} KV heads"
            )
        if len(self.mrope_section) != 3 or sum(self.mrope_section) * 2 != self.head_dim:
            raise ValueError(
                f"config.json: mrope_section {self.mrope_section} must be three parts of "
                f"{self.head_dim // 2}"
            )


def read_text_config(model_dir: Path) -> TextConfig:
    """Reads config.json and generation_config.json. Raises ValueError naming what is wrong."""
    return from_hf(
        read_json(model_dir / "config.json"),
        read_json(model_dir / "generation_config.json", optional=True),
    )


def from_hf(config: dict[str, Any], generation: dict[str, Any]) -> TextConfig:
    """The frozen value of the two JSON objects.

    Raises:
        ValueError: A field is missing, or asks for something this engine does not do.
    """
    text = config.get("text_config") or config
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    _refuse_unsupported(text, rope)
    heads = _need(text, "num_attention_heads")
    vision = config.get("vision_config") or {}
    return TextConfig(
        architecture=_need(config, "architectures")[0],
        family=_need(config, "model_type"),
        vocab_size=_need(text, "vocab_size"),
        hidden_size=_need(text, "hidden_size"),
        intermediate_size=_need(text, "intermediate_size"),
        num_layers=_need(text, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or _need(text, "hidden_size") // heads,
        rms_eps=text.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta") or _need(text, "rope_theta")),
        mrope_section=tuple(_need(rope, "mrope_section")),
        max_positions=_need(text, "max_position_embeddings"),
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        eos_token_ids=_eos(config, text, generation),
        image_token_id=_need(config, "image_token_id"),
        video_token_id=_need(config, "video_token_id"),
        masked_token_ids=_masked(config),
        spatial_merge_size=vision.get("spatial_merge_size", 2),
        tokens_per_second=float(vision.get("tokens_per_second", 2)),
        deepstack_levels=len(vision.get("deepstack_visual_indexes") or ()),
    )


def _need(section: dict[str, Any], key: str) -> Any:
    if section.get(key) is None:
        raise ValueError(f"config.json: {key} is missing")
    return section[key]


def _refuse_unsupported(text: dict[str, Any], rope: dict[str, Any]) -> None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "mrope"):
        raise ValueError(f"config.json: rope type {kind!r} is not supported; known: default, mrope")
    if text.get("use_sliding_window"):
        raise ValueError("config.json: use_sliding_window is not supported")
    if text.get("hidden_act", "silu") != "silu":
        raise ValueError(f"config.json: hidden_act {text['hidden_act']!r} is not supported")


def _eos(
    config: dict[str, Any], text: dict[str, Any], generation: dict[str, Any]
) -> tuple[int, ...]:
    for section in (generation, config, text):
        value = section.get("eos_token_id")
        if value is not None:
            return tuple(value) if isinstance(value, list) else (value,)
    raise ValueError("config.json and generation_config.json: eos_token_id is missing")


def _masked(config: dict[str, Any]) -> tuple[int, ...]:
    names = ("image", "video", "vision_start", "vision_end", "vision")
    ids = (config.get(f"{name}_token_id") for name in names)
    return tuple(sorted({i for i in ids if i is not None}))
