"""Reads a rank's part of the safetensors files straight into its parameters.

Owns names (checkpoint layouts are mapped to one), slices, completeness and the progress bar. What
belongs to the vision tower, or to another rank, is never read.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from chiasm.checkpoint import weight_files
from chiasm.digest import is_tower_tensor
from chiasm.loading_bar import LoadingBar
from chiasm.stored_tensor import StoredTensor, TensorFile
from chiasm.weight_copier import copier_for
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
_CPU = torch.device("cpu")
_DERIVED = ("rotary_emb.inv_freq",)  # old checkpoints store what is computed from the config


def place(module: nn.Module, device: torch.device) -> None:
    """Takes memory for the parameters of a module that are on no device yet.

    `Module.to_empty` does too, but by an operation that has torch import sympy: half a second and
    thirty megabytes of every rank.
    """
    for part in module.modules():
        for name, weight in part.named_parameters(recurse=False):
            if weight.is_meta:
                memory = torch.empty(weight.shape, dtype=weight.dtype, device=device)
                setattr(part, name, nn.Parameter(memory, requires_grad=weight.requires_grad))


class CheckpointReader:
    """Opens the files of a checkpoint; a context manager. What it was asked for is there after
    `wait`: on a GPU it arrives while more is asked for.

    Args:
        model_dir: Directory with *.safetensors.
        device: Where the parameters are.

    Raises:
        ValueError: No such files, one is missing or broken, or the same tensor in two layouts.
    """

    def __init__(self, model_dir: Path, device: torch.device = _CPU) -> None:
        self._where: dict[str, StoredTensor] = {}
        self._packing = Packing()
        paths = weight_files(model_dir, wanted=_is_language_model)
        self._files = [TensorFile(path) for path in paths]
        for tensor in (tensor for file in self._files for tensor in file.tensors()):
            if not _is_language_model(tensor.name):
                continue
            name = _canonical(tensor.name)
            if name in self._where:
                raise ValueError(f"{model_dir}: tensor {name} is there twice")
            self._where[name] = tensor
        self._device = device
        self._progress = LoadingBar("weights")
        self._copier = copier_for(device, self._progress.add)

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._copier.close()
        self._progress.close()
        for file in self._files:
            file.close()
        self._where.clear()

    def place(self, module: nn.Module) -> None:
        """Takes memory for a module's parameters, which are on no device yet. On a GPU that takes
        a while, so modules are placed one by one, while what was asked for before is read."""
        with torch.inference_mode(False):  # parameters like any others
            place(module, self._device)

    def wait(self) -> None:
        """Returns once all that was asked for is there. Raises ValueError: a file was cut short."""
        self._copier.wait()

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
        """Reads a whole tensor.

        This and the other readings raise ValueError when the checkpoint lacks the tensor, or has
        it in another shape than the config says.
        """
        self._copy(self._open(name, tuple(target.shape)), target)

    def rows(self, name: str, shard: Shard, target: torch.Tensor) -> None:
        """The shard of the first dimension, [len(shard), ...].

        What a padded shard has past the tensor's end becomes zero.
        """
        piece = self._open(name, (shard.of, *target.shape[1:]))
        held = max(0, min(shard.end, shard.of) - shard.begin)
        if held < len(target):
            target[held:].zero_()
        if held:
            self._copy(piece, target[:held], rows=slice(shard.begin, shard.begin + held))

    def columns(self, name: str, shard: Shard, target: torch.Tensor) -> None:
        """The shard of the second dimension, [out, len(shard)]."""
        piece = self._open(name, (target.shape[0], shard.of))
        self._copy(piece, target, columns=slice(shard.begin, shard.end))

    def scales(
        self,
        name: str,
        target: torch.Tensor,
        *,
        rows: Shard | None = None,
        columns: Shard | None = None,
    ) -> None:
        """The scales of a part of a matrix of 8 bits, [blocks of rows, blocks of columns].

        Args:
            name: Of the matrix.
            target: Float32.
            rows: The part's rows, which begin and end between blocks; None = all.
            columns: Its columns, likewise.
        """
        piece = self._locate(name)
        if piece is None or piece.scales is None:
            raise ValueError(f"checkpoint lacks tensor {name}{SCALES}")
        begin = 0
        for block in piece.scale_blocks(_cut(rows), _cut(columns)):
            self._copier.put(block, target[begin : begin + block.lines])
            begin += block.lines

    def experts(self, name: str, own: range, target: torch.Tensor) -> bool:
        """The matrices of these experts as they are joined, where a checkpoint has them so.

        Args:
            name: Of the joined tensor.
            own: The experts.
            target: [experts, out, in].

        Returns:
            Whether it has, and they are on their way; else they must be read one by one.
        """
        found = self._find(name)
        if found is None or self._find(f"{name}{SCALES}") is not None:
            return False
        goal = target.transpose(1, 2) if self._packing.swapped else target
        if found.shape[1:] != goal.shape[1:] or len(found.shape) != 3:
            return False  # reading them one by one says what is wrong
        self._copier.put(found.rows(own.start, own.stop), goal)
        return True

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

    def _find(self, name: str) -> StoredTensor | None:
        return self._where.get(name)

    def _experts_swapped(self, config: TextConfig) -> bool:
        if config.experts is None:
            return False
        layers = range(config.num_layers)
        names = tuple(f"model.layers.{layer}.mlp.experts" for layer in layers)
        width = config.experts.intermediate_size
        return experts_are_swapped(self._find, names, hidden=config.hidden_size, width=width)

    def _copy(
        self,
        piece: Piece,
        target: torch.Tensor,
        *,
        rows: slice = slice(None),
        columns: slice = slice(None),
    ) -> None:
        if piece.scales is None or piece.tensor.dtype is target.dtype:
            begin, goal = 0, target.t() if piece.swapped else target
            for block in piece.blocks(rows, columns):
                self._copier.put(block, goal[begin : begin + block.lines])
                begin += block.lines
        else:
            target.copy_(piece.multiplied_out(rows, columns, device=target.device))
            self._progress.add(target.nbytes)

    def expect_bytes(self, total: int) -> None:
        """How much this rank will read, for the progress bar."""
        self._progress.total = total


def _cut(shard: Shard | None) -> slice:
    return slice(None) if shard is None else slice(shard.begin, shard.end)


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
