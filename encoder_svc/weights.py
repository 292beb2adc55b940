"""Reads the vision tower's tensors from a checkpoint's safetensors files, and no others.

Every parameter must be found and every tensor of the tower must be used: a half-loaded tower
answers with confident nonsense.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import torch
from safetensors import safe_open

from chiasm.checkpoint import read_json, weight_files
from chiasm.loading_bar import LoadingBar
from encoder_svc.models.base import VisionTower
from encoder_svc.models.registry import architecture_of, tower_class

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
    total = sum(
        p.numel() * (torch.float32 if name in wide else dtype).itemsize
        for name, p in missing.items()
    )
    with closing(LoadingBar("vision tower", total=total)) as bar:
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
            bar.add(value.nbytes)
    _check(model_dir, list(missing), extra)
    tower.finish()
    tower.eval()
    return tower


def _tensors(model_dir: Path, prefixes: tuple[str, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tower's tensors under the names of our modules, each read once."""
    for path in weight_files(model_dir, wanted=lambda name: name.startswith(prefixes)):
        with safe_open(path, framework="pt") as file:
            for full_name in file.keys():  # noqa: SIM118 (not a mapping)
                for prefix in prefixes:
                    if full_name.startswith(prefix):
                        yield full_name.removeprefix(prefix), file.get_tensor(full_name)


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
