"""Turns a checkpoint's config.json into a frozen TextConfig: the one place that knows the dialects.

Dialects: text settings nested in `text_config` or at the top level; rope settings in
`rope_parameters`, in `rope_scaling`, or beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chiasm.checkpoint import read_config
from chiasm.json_file import read_json

# "dynamic" changes angles of sequences beyond max_position_embeddings only, which are refused.
_ROPE_TYPES = ("default", "mrope", "dynamic")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts in place of the feed-forward block."""

    num_experts: int
    top_k: int
    """Experts of a token."""
    intermediate_size: int
    """Width of one expert."""
    shared_size: int = 0
    """Width of the experts that every token passes through, all together; 0 = none."""
    dense_layers: frozenset[int] = frozenset()
    """Layers that keep an ordinary feed-forward block."""
    sigmoid: bool = False
    """Scores are sigmoids, chosen by with a learned correction; else a softmax."""
    num_groups: int = 1
    top_groups: int = 1
    """Experts are chosen from the best so many groups."""
    normalize: bool = True
    """The weights of a token's experts sum to one, before scaling."""
    scale: float = 1.0


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
    """Rotary frequencies that follow time, height and width, rotary_dim / 2 in all; empty: there is
    one position for all of them."""
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
    rotary_dim: int
    """Elements of a head that turn; the rest pass."""
    mrope_interleaved: bool = False
    """Time, height and width take turns among the frequencies, else each has a stretch of them."""
    rotary_pairs: bool = False
    """Elements (2i, 2i + 1) turn together, else (i, i + rotary_dim / 2)."""
    qkv_bias: bool = True
    qk_norm: bool = False
    """Queries and keys are normalised head by head."""
    sandwich_norms: bool = False
    """What attention and feed-forward give is normalised once more before it is added."""
    experts: ExpertsConfig | None = None
    eight_bits: bool = False
    """Matrices of attention and feed-forward are stored in 8 bits, a scale for each 128 x 128."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"config.json: {self.num_heads} heads over {self.num_kv_heads} KV heads"
            )
        parts = self.mrope_section
        if parts and (len(parts) != 3 or sum(parts) * 2 != self.rotary_dim):
            raise ValueError(
                f"config.json: mrope_section {parts} must be three parts of {self.rotary_dim // 2}"
            )

    def expert_layer(self, layer: int) -> ExpertsConfig | None:
        """The experts of a layer, if it has any."""
        experts = self.experts
        return None if experts is None or layer in experts.dense_layers else experts


def read_text_config(model_dir: Path) -> TextConfig:
    """Reads config.json and generation_config.json. Raises ValueError naming what is wrong."""
    return from_hf(
        read_config(model_dir),
        read_json(model_dir / "generation_config.json", optional=True),
    )


def from_hf(config: dict[str, Any], generation: dict[str, Any]) -> TextConfig:
    """The frozen value of the two JSON objects, as the architecture's family reads them.

    Raises:
        ValueError: An unknown architecture, a field that is missing, or one that asks for something
            this engine does not do.
    """
    from decoder_svc.models.registry import family_of  # families read by the functions below

    return family_of(need(config, "architectures")[0]).read_config(config, generation)


def read_text(config: dict[str, Any], generation: dict[str, Any], **family: Any) -> TextConfig:
    """What all families' files have in common; `family` adds to it or says otherwise.

    Raises:
        ValueError: As `from_hf`.
    """
    text = config.get("text_config") or config
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    _refuse_unsupported(text, rope)
    quantization = config.get("quantization_config") or text.get("quantization_config")
    _refuse_quantization(quantization)
    heads = need(text, "num_attention_heads")
    head_dim = text.get("head_dim") or need(text, "hidden_size") // heads
    partial = rope.get("partial_rotary_factor") or text.get("partial_rotary_factor") or 1.0
    vision = config.get("vision_config") or {}
    known: dict[str, Any] = {
        "architecture": need(config, "architectures")[0],
        "vocab_size": need(text, "vocab_size"),
        "hidden_size": need(text, "hidden_size"),
        "intermediate_size": need(text, "intermediate_size"),
        "num_layers": need(text, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": text.get("num_key_value_heads") or heads,
        "head_dim": head_dim,
        "rms_eps": text.get("rms_norm_eps", 1e-6),
        "rope_theta": float(rope.get("rope_theta") or need(text, "rope_theta")),
        "rotary_dim": int(head_dim * partial),
        "mrope_section": tuple(rope.get("mrope_section") or ()),
        "mrope_interleaved": bool(rope.get("mrope_interleaved", False)),
        "max_positions": need(text, "max_position_embeddings"),
        "tied": bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        "eos_token_ids": _eos(config, text, generation),
        "masked_token_ids": masked_tokens(config),
        "spatial_merge_size": vision.get("spatial_merge_size", 2),
        "tokens_per_second": float(vision.get("tokens_per_second", 2)),
        "eight_bits": not _keeps_some(quantization) if quantization else False,
    }
    for kind in ("image", "video"):
        if f"{kind}_token_id" not in family:
            known[f"{kind}_token_id"] = need(config, f"{kind}_token_id")
    return TextConfig(**{**known, **family})


def need(section: dict[str, Any], key: str) -> Any:
    """The field of a section. Raises ValueError when it is missing."""
    if section.get(key) is None:
        raise ValueError(f"config.json: {key} is missing")
    return section[key]


def _refuse_unsupported(text: dict[str, Any], rope: dict[str, Any]) -> None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in _ROPE_TYPES:
        known = ", ".join(_ROPE_TYPES)
        raise ValueError(f"config.json: rope type {kind!r} is not supported; known: {known}")
    if text.get("use_sliding_window"):
        raise ValueError("config.json: use_sliding_window is not supported")
    if text.get("hidden_act", "silu") != "silu":
        raise ValueError(f"config.json: hidden_act {text['hidden_act']!r} is not supported")


def _refuse_quantization(quantization: dict[str, Any] | None) -> None:
    """Weights of 8 bits with a scale per block are what is known."""
    if not quantization:
        return
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method != "fp8" or list(block or ()) != [128, 128]:
        raise ValueError(
            f"config.json: quantization {method!r} with blocks of {block} is not supported; "
            "known: 'fp8' with blocks of [128, 128]"
        )


def _keeps_some(quantization: dict[str, Any]) -> bool:
    """Whether some matrices of the language model's layers, routers aside, have all their bits."""
    kept = quantization.get("modules_to_not_convert") or quantization.get("ignored_layers") or ()
    return any(name.endswith("_proj") and ".layers." in name for name in kept)


def _eos(
    config: dict[str, Any], text: dict[str, Any], generation: dict[str, Any]
) -> tuple[int, ...]:
    for section in (generation, config, text):
        value = section.get("eos_token_id")
        if value is not None:
            return tuple(value) if isinstance(value, list) else (value,)
    raise ValueError("config.json and generation_config.json: eos_token_id is missing")


def masked_tokens(config: dict[str, Any], *more: str) -> tuple[int, ...]:
    """Ids of tokens that stand for media or enclose them; `more` names some beside the usual."""
    names = ("image", "video", "vision_start", "vision_end", "vision", *more)
    ids = (config.get(f"{name}_token_id") for name in names)
    return tuple(sorted({i for i in ids if i is not None}))
