"""Reads the vision tower's tensors from a checkpoint's safetensors files, and no others.

Every parameter must be found and every tensor of the tower must be used: a half-loaded tower
answers with confident nonsense.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open

from chiasm.checkpoint import read_json
from encoder_svc.models.base import VisionTower
from encoder_svc.models.registry import architecture_of, tower_class

_QUIET_S = 2.0
_SHOWN_NAMES = 5


def load_tower(model_dir: Path, *, device: torch.device, dtype: torch.dtype) -> VisionTower:
    """The tower of a checkpoint, ready to run.

    Args:
        model_dir: Directory with config.json and *.safetensors.
        device: Where it lives.
        dtype: Of its parameters; a float16 tower keeps some in float32.

    Raises:
        ValueError: Unknown architecture, or tensors missing, left over or of a wrong shape.
    """
    config = read_json(model_dir / "config.json")
    with torch.device("meta"):
        tower = tower_class(architecture_of(config)).from_config(config)
    wide = tower.wide_parameters() if dtype is torch.float16 else frozenset()
    missing = dict(tower.named_parameters())
    extra: list[str] = []
    with _progress(len(missing)) as advance:
        for name, tensor in _tensors(model_dir, tower.prefixes):
            parameter = missing.pop(name, None)
            if parameter is None:
                extra.append(name)
                continue
            target = torch.float32 if name in wide else dtype
            value = _fit(name, tensor, parameter.shape).to(device, target)
            tower.get_submodule(name.rpartition(".")[0]).register_parameter(
                name.rpartition(".")[2], torch.nn.Parameter(value, requires_grad=False)
            )
            advance()
    _check(model_dir, list(missing), extra)
    tower.eval()
    return tower


def _tensors(model_dir: Path, prefixes: tuple[str, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tower's tensors under the names of our modules, each read once."""
    for path in _files(model_dir, prefixes):
        with safe_open(path, framework="pt") as file:
            for full_name in file.keys():  # noqa: SIM118 (not a mapping)
                for prefix in prefixes:
                    if full_name.startswith(prefix):
                        yield full_name.removeprefix(prefix), file.get_tensor(full_name)


def _files(model_dir: Path, prefixes: tuple[str, ...]) -> list[Path]:
    index = model_dir / "model.safetensors.index.json"
    if not index.exists():
        return sorted(model_dir.glob("*.safetensors"))
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict):
        raise ValueError(f"{index} has no weight_map")
    files = sorted({model_dir / file for name, file in names.items() if name.startswith(prefixes)})
    for path in files:
        if not path.exists():
            raise ValueError(f"{index.name} names {path.name}, which is not there")
    return files


def _fit(name: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A convolution kernel that never overlaps is a matrix with its last dimensions flattened."""
    if tensor.shape != shape and tensor.dim() > len(shape) and tensor.flatten(1).shape == shape:
        return tensor.flatten(1)
    if tensor.shape != shape:
        raise ValueError(
            f"tensor {name} has shape {tuple(tensor.shape)}, the config says {tuple(shape)}"
        )
    return tensor


def _check(model_dir: Path, missing: list[str], extra: list[str]) -> None:
    for what, names in (("lacks", missing), ("has unknown", extra)):
        if names:
            shown = ", ".join(sorted(names)[:_SHOWN_NAMES])
            more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
            raise ValueError(f"{model_dir} {what} tensors of the vision tower: {shown}{more}")


class _Bar:
    """A progress bar on stderr that shows itself only when loading takes long."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._began = time.monotonic()
        self._done = 0
        self._progress = Progress(console=Console(file=sys.stderr), transient=True)
        self._task = self._progress.add_task("vision tower", total=total)

    def advance(self) -> None:
        self._done += 1
        if time.monotonic() - self._began > _QUIET_S:
            self._progress.start()  # no effect when started
        self._progress.update(self._task, completed=self._done)

    def stop(self) -> None:
        self._progress.stop()


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    if not sys.stderr.isatty():
        yield lambda: None
        return
    bar = _Bar(total)
    try:
        yield bar.advance
    finally:
        bar.stop()
