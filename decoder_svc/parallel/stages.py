"""Which stage holds what of a model, and whether the model can be laid out as asked at all."""

from __future__ import annotations

from decoder_svc.config.from_hf import TextConfig
from decoder_svc.parallel.mesh import ParallelMesh


def stage_layers(config: TextConfig, mesh: ParallelMesh) -> range:
    """The layers of the rank's stage; the lm_head counts as the layers it weighs as much as.

    A decoding step reads every weight once, so weight stands for time. The token embedding is
    looked up, not read, and counts as nothing.
    """
    heads = config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    layer = config.hidden_size * (heads + 3 * _feed_forward_width(config))
    head = config.vocab_size * config.hidden_size / layer
    return mesh.layers(config.num_layers, head=head)


def _feed_forward_width(config: TextConfig) -> int:
    """Columns that a token passes through in most layers."""
    experts = config.experts
    if experts is None:
        return config.intermediate_size
    return experts.top_k * experts.intermediate_size + experts.shared_size


def check_layout(config: TextConfig, *, tp_size: int, pp_size: int, ep_size: int = 1) -> None:
    """Checks that every part of the model divides as asked, before anything is loaded.

    KV heads fewer than ranks are replicated, the vocabulary is padded; all else must divide.

    Raises:
        ValueError: Naming what does not divide, or a first stage without the layers that take the
            encoder's deeper features in.
    """
    mesh = ParallelMesh(tp_size=tp_size, pp_size=pp_size, ep_size=ep_size)
    mesh.split(config.num_heads, what="attention heads")
    mesh.split_kv(config.num_kv_heads, config.head_dim)
    _check_feed_forward(config, mesh)
    first = len(stage_layers(config, mesh))
    if first < config.deepstack_levels:
        raise ValueError(
            f"--pp-size {pp_size} leaves {first} layers to the first stage, which must hold the "
            f"{config.deepstack_levels} that add features of the encoder"
        )


def _check_feed_forward(config: TextConfig, mesh: ParallelMesh) -> None:
    experts = config.experts
    if experts is None:
        if mesh.ep_size > 1:
            raise ValueError(f"--ep-size {mesh.ep_size}: this model has no experts")
        mesh.split(config.intermediate_size, what="intermediate_size")
        return
    mesh.experts(experts.num_experts)
    mesh.split_expert(experts.intermediate_size)
    mesh.split(experts.shared_size, what="width of the shared experts")
    if experts.dense_layers:
        mesh.split(config.intermediate_size, what="intermediate_size")
