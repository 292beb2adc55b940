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
from encoder_svc.models.base import Place, VisionTower
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
    targets = {
        name: _Target(parameter, torch.float32 if name in wide else dtype, device)
        for name, parameter in tower.named_parameters()
    }
    extra: list[str] = []
    with closing(LoadingBar("vision tower", total=sum(t.nbytes for t in targets.values()))) as bar:
        for stored, tensor in _tensors(model_dir, tower.prefixes):
            place = tower.place_of(stored)
            target = None if place is None else targets.get(place.name)
            if place is None or target is None:
                extra.append(stored if place is None else place.name)
                continue
            bar.add(target.fill(place, tensor))
    missing = [name for name, target in targets.items() if not target.full]
    if not missing:
        for name, target in targets.items():
            module, _, attribute = name.rpartition(".")
            tower.get_submodule(module).register_parameter(attribute, target.parameter())
    _check(model_dir, missing, extra)
    tower.finish()
    tower.eval()
    return tower


class _Target:
    """One parameter while it is read, in one piece or in several."""

    def __init__(self, parameter: torch.nn.Parameter, dtype: torch.dtype, device: torch.device):
        self._shape = parameter.shape
        self._dtype = dtype
        self._device = device
        self._values: torch.Tensor | None = None
        self._parts: set[int] = set()
        self._of = 1
        self.nbytes = parameter.numel() * dtype.itemsize

    @property
    def full(self) -> bool:
        """Whether every part has been read."""
        return len(self._parts) == self._of

    def fill(self, place: Place, tensor: torch.Tensor) -> int:
        """Takes a part in; returns its bytes. Raises ValueError for a wrong shape."""
        self._parts.add(place.part)
        self._of = place.of
        height = self._shape[0] // place.of
        part = _fit(place.name, tensor, torch.Size((height, *self._shape[1:])))
        if place.of == 1:
            self._values = part.to(self._device, self._dtype)
            return self._values.nbytes
        if self._values is None:
            self._values = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        own = self._values[place.part * height : (place.part + 1) * height]
        own.copy_(part)
        return own.nbytes

    def parameter(self) -> torch.nn.Parameter:
        """The whole, once it is full."""
        assert self._values is not None
        return torch.nn.Parameter(self._values, requires_grad=False)


def _tensors(model_dir: Path, prefixes: tuple[str, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tower's tensors as the checkpoint names them, each read once."""
    for path in weight_files(model_dir, wanted=lambda name: name.startswith(prefixes)):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                if name.startswith(prefixes):
                    yield name, file.get_tensor(name)


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
