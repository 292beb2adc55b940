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
    layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    head = config.vocab_size * config.hidden_size / layer
    return mesh.layers(config.num_layers, head=head)


def check_layout(config: TextConfig, *, tp_size: int, pp_size: int) -> None:
    """Checks that every part of the model divides as asked, before anything is loaded.

    KV heads fewer than ranks are replicated, the vocabulary is padded; all else must divide.

    Raises:
        ValueError: Naming what does not divide, or a first stage without the layers that take the
            encoder's deeper features in.
    """
    mesh = ParallelMesh(tp_size=tp_size, pp_size=pp_size)
    mesh.split(config.num_heads, what="attention heads")
    mesh.split_kv(config.num_kv_heads, config.head_dim)
    mesh.split(config.intermediate_size, what="intermediate_size")
    first = len(stage_layers(config, mesh))
    if first < config.deepstack_levels:
        raise ValueError(
            f"--pp-size {pp_size} leaves {first} layers to the first stage, which must hold the "
            f"{config.deepstack_levels} that add features of the encoder"
        )
