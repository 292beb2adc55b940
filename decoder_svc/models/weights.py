"""Reads a rank's part of the safetensors files straight into its parameters.

Owns names (checkpoint layouts are mapped to one), slices, completeness and the progress bar. What
belongs to the vision tower, or to another rank, is never read.
"""

from __future__ import annotations

import time
from collections.abc import Set
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from safetensors import safe_open

from chiasm.digest import is_tower_tensor
from decoder_svc.parallel.mesh import Shard

_LAYOUTS = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_DERIVED = ("rotary_emb.inv_freq",)  # old checkpoints store what is computed from the config
_BAR_AFTER_S = 2.0


class CheckpointReader:
    """Opens the files of a checkpoint; a context manager.

    Args:
        model_dir: Directory with *.safetensors.

    Raises:
        ValueError: No such files, or the same tensor in two layouts.
    """

    def __init__(self, model_dir: Path) -> None:
        self._files = [
            safe_open(str(path), framework="pt") for path in sorted(model_dir.glob("*.safetensors"))
        ]
        if not self._files:
            raise ValueError(f"no *.safetensors in {model_dir}")
        self._where: dict[str, tuple[Any, str]] = {}
        for file in self._files:
            for stored in file.keys():  # noqa: SIM118, not a mapping
                if is_tower_tensor(stored) or stored.endswith(_DERIVED):
                    continue
                name = _canonical(stored)
                if name in self._where:
                    raise ValueError(f"{model_dir}: tensor {name} is there twice")
                self._where[name] = (file, stored)
        self._progress = _Progress()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.close()
        self._files.clear()
        self._where.clear()

    def check(self, expected: Set[str], *, optional: Set[str] = frozenset()) -> None:
        """Raises ValueError naming tensors that are missing, or that nothing would read."""
        missing = sorted(expected - self._where.keys())
        if missing:
            raise ValueError(f"checkpoint lacks {len(missing)} tensors: {_some(missing)}")
        extra = sorted(self._where.keys() - expected - optional)
        if extra:
            raise ValueError(f"checkpoint has {len(extra)} unknown tensors: {_some(extra)}")

    def full(self, name: str, target: torch.Tensor) -> None:
        """The whole tensor."""
        stored = self._open(name, tuple(target.shape))
        self._copy(stored[:], target)

    def rows(self, name: str, shard: Shard, target: torch.Tensor) -> None:
        """The shard of the first dimension; what a padded shard has past the end becomes zero."""
        stored = self._open(name, (shard.of, *target.shape[1:]))
        held = max(0, min(shard.end, shard.of) - shard.begin)
        if held < len(target):
            target[held:].zero_()
        if held:
            self._copy(stored[shard.begin : shard.begin + held], target[:held])

    def columns(self, name: str, shard: Shard, target: torch.Tensor) -> None:
        """The shard of the second dimension."""
        stored = self._open(name, (target.shape[0], shard.of))
        self._copy(stored[:, shard.begin : shard.end], target)

    def _open(self, name: str, shape: tuple[int, ...]) -> Any:
        if name not in self._where:
            raise ValueError(f"checkpoint lacks tensor {name}")
        file, stored = self._where[name]
        found = file.get_slice(stored)
        if tuple(found.get_shape()) != shape:
            raise ValueError(
                f"tensor {name} is {tuple(found.get_shape())} in the checkpoint, "
                f"{shape} by the config"
            )
        return found

    def _copy(self, values: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(values)
        self._progress.add(target.nbytes)

    def expect_bytes(self, total: int) -> None:
        """How much this rank will read, for the progress bar."""
        self._progress.total = total


class _Progress:
    """A bar on stderr, shown only once reading has taken a while."""

    def __init__(self) -> None:
        self.total: int | None = None
        self._begun = time.monotonic()
        self._done = 0
        self._bar: Progress | None = None

    def add(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._bar is None:
            if time.monotonic() - self._begun < _BAR_AFTER_S:
                return
            columns = (TextColumn("weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._bar.add_task("weights", total=self.total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=self._done)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _canonical(stored: str) -> str:
    for prefix, replacement in _LAYOUTS:
        if stored.startswith(prefix):
            return replacement + stored.removeprefix(prefix)
    return stored


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
