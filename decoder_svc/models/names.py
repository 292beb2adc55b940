"""The one layout of names that layers load by; other layouts are mapped to it as files are read."""

from __future__ import annotations

from collections.abc import Iterator, Set

from decoder_svc.config.from_hf import TextConfig


def tensor_names(config: TextConfig) -> Set[str]:
    """Every tensor that a checkpoint must hold for the language model, in one layout's names."""
    names = {"model.embed_tokens.weight", "model.norm.weight"}
    if not config.tied:
        names.add("lm_head.weight")
    for layer in range(config.num_layers):
        names.update(f"model.layers.{layer}.{tensor}" for tensor in _layer_tensors(config, layer))
    return names


def _layer_tensors(config: TextConfig, layer: int) -> Iterator[str]:
    yield from (f"{name}layernorm.weight" for name in ("input_", "post_attention_"))
    if config.sandwich_norms:
        yield from (f"{name}layernorm.weight" for name in ("post_self_attn_", "post_mlp_"))
    yield from (f"self_attn.{part}_proj.weight" for part in "qkvo")
    if config.qkv_bias:
        yield from (f"self_attn.{part}_proj.bias" for part in "qkv")
    if config.qk_norm:
        yield from (f"self_attn.{part}_norm.weight" for part in "qk")
    experts = config.expert_layer(layer)
    if experts is None:
        yield from _mlp_tensors("mlp")
        return
    yield "mlp.gate.weight"
    if experts.sigmoid:
        yield "mlp.gate.e_score_correction_bias"
    if experts.shared_size:
        yield from _mlp_tensors("mlp.shared_experts")
    for expert in range(experts.num_experts):
        yield from _mlp_tensors(f"mlp.experts.{expert}")


def _mlp_tensors(name: str) -> Iterator[str]:
    return (f"{name}.{part}_proj.weight" for part in ("gate", "up", "down"))
