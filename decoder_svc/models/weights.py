"""Reads a rank's part of the safetensors files straight into its parameters.

Owns names (checkpoint layouts are mapped to one), slices, completeness and the progress bar. What
belongs to the vision tower, or to another rank, is never read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from chiasm.checkpoint import weight_files
from chiasm.digest import is_tower_tensor
from chiasm.loading_bar import LoadingBar
from decoder_svc.config.from_hf import TextConfig
from decoder_svc.models.names import tensor_names
from decoder_svc.models.packing import (
    SCALES,
    Heads,
    Packing,
    Piece,
    experts_are_swapped,
    locate,
)
from decoder_svc.parallel.mesh import Shard

_LAYOUTS = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
# InternLM2's words for the same.
_WORDS = (
    ("language_model.output.", "lm_head."),
    (".tok_embeddings.", ".embed_tokens."),
    (".attention.wqkv.", ".self_attn.wqkv."),
    (".attention.wo.", ".self_attn.o_proj."),
    (".attention_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    (".feed_forward.w1.", ".mlp.gate_proj."),
    (".feed_forward.w2.", ".mlp.down_proj."),
    (".feed_forward.w3.", ".mlp.up_proj."),
)
_DERIVED = ("rotary_emb.inv_freq",)  # old checkpoints store what is computed from the config


class CheckpointReader:
    """Opens the files of a checkpoint; a context manager.

    Args:
        model_dir: Directory with *.safetensors.

    Raises:
        ValueError: No such files, one is missing, or the same tensor in two layouts.
    """

    def __init__(self, model_dir: Path) -> None:
        self._files = [
            safe_open(str(path), framework="pt")
            for path in weight_files(model_dir, wanted=_is_language_model)
        ]
        self._where: dict[str, tuple[Any, str]] = {}
        for file in self._files:
            for stored in file.keys():  # noqa: SIM118, not a mapping
                if not _is_language_model(stored):
                    continue
                name = _canonical(stored)
                if name in self._where:
                    raise ValueError(f"{model_dir}: tensor {name} is there twice")
                self._where[name] = (file, stored)
        self._packing = Packing()
        self._progress = LoadingBar("weights")

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.close()
        self._files.clear()
        self._where.clear()

    def check(self, config: TextConfig) -> None:
        """Raises ValueError naming tensors that are missing, or that nothing would read."""
        queries = config.num_heads // config.num_kv_heads
        heads = Heads(config.num_kv_heads, queries, config.head_dim)
        self._packing = Packing(self._experts_swapped(config), heads)
        used, missing = set(), []
        for name in sorted(tensor_names(config)):
            piece = self._locate(name)
            if piece is None:
                missing.append(name)
            else:
                used.add(piece.stored)
                if piece.scales is not None:
                    used.add(f"{piece.stored}{SCALES}")
        if missing:
            raise ValueError(f"checkpoint lacks {len(missing)} tensors: {_some(missing)}")
        if config.tied:  # a tied checkpoint may store it all the same
            used.add("lm_head.weight")
        extra = sorted(self._where.keys() - used)
        if extra:
            raise ValueError(f"checkpoint has {len(extra)} unknown tensors: {_some(extra)}")

    def full(self, name: str, target: torch.Tensor) -> None:
        """The whole tensor."""
        self._copy(self._open(name, tuple(target.shape)).read(), target)

    def rows(self, name: str, shard: Shard, target: torch.Tensor) -> None:
        """The shard of the first dimension; what a padded shard has past the end becomes zero."""
        piece = self._open(name, (shard.of, *target.shape[1:]))
        held = max(0, min(shard.end, shard.of) - shard.begin)
        if held < len(target):
            target[held:].zero_()
        if held:
            self._copy(piece.read(slice(shard.begin, shard.begin + held)), target[:held])

    def columns(self, name: str, shard: Shard, target: torch.Tensor) -> None:
        """The shard of the second dimension."""
        piece = self._open(name, (target.shape[0], shard.of))
        self._copy(piece.read(columns=slice(shard.begin, shard.end)), target)

    def _open(self, name: str, shape: tuple[int, ...]) -> Piece:
        piece = self._locate(name)
        if piece is None:
            raise ValueError(f"checkpoint lacks tensor {name}")
        if piece.shape != shape:
            raise ValueError(
                f"tensor {name} is {piece.shape} in the checkpoint, {shape} by the config"
            )
        return piece

    def _locate(self, name: str) -> Piece | None:
        return locate(name, self._find, self._packing)

    def _find(self, name: str) -> Any:
        if name not in self._where:
            return None
        file, stored = self._where[name]
        return file.get_slice(stored)

    def _experts_swapped(self, config: TextConfig) -> bool:
        if config.experts is None:
            return False
        layers = range(config.num_layers)
        names = tuple(f"model.layers.{layer}.mlp.experts" for layer in layers)
        width = config.experts.intermediate_size
        return experts_are_swapped(self._find, names, hidden=config.hidden_size, width=width)

    def _copy(self, values: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(values)
        self._progress.add(target.nbytes)

    def expect_bytes(self, total: int) -> None:
        """How much this rank will read, for the progress bar."""
        self._progress.total = total


def _is_language_model(stored: str) -> bool:
    return not is_tower_tensor(stored) and not stored.endswith(_DERIVED)


def _canonical(stored: str) -> str:
    for theirs, ours in _WORDS:
        stored = stored.replace(theirs, ours)
    for prefix, replacement in _LAYOUTS:
        if stored.startswith(prefix):
            return replacement + stored.removeprefix(prefix)
    return stored


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
