"""Reads the vision tower's tensors from a checkpoint's safetensors files, and no others.

Every parameter must be found and every tensor of the tower must be used: a half-loaded tower
answers with confident nonsense.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import torch

from chiasm.checkpoint import weight_files
from chiasm.json_file import read_json
from chiasm.loading_bar import LoadingBar
from chiasm.stored_tensor import StoredTensor, TensorFile
from chiasm.weight_copier import WeightCopier, copier_for
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
    total = sum(target.nbytes for target in targets.values())
    extra: list[str] = []
    with ExitStack() as stack:
        bar = stack.enter_context(closing(LoadingBar("vision tower", total=total)))
        files = [stack.enter_context(closing(file)) for file in _files(model_dir, tower.prefixes)]
        copier = stack.enter_context(closing(copier_for(device, bar.add)))
        for tensor in _tensors(files, tower.prefixes):
            place = tower.place_of(tensor.name)
            target = None if place is None else targets.get(place.name)
            if place is None or target is None:
                extra.append(tensor.name if place is None else place.name)
            else:
                target.fill(place, tensor, copier)
        copier.wait()
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

    def fill(self, place: Place, tensor: StoredTensor, copier: WeightCopier) -> None:
        """Takes a part in, which is there once the copier has it. Raises ValueError for a wrong
        shape."""
        self._parts.add(place.part)
        self._of = place.of
        height = self._shape[0] // place.of
        _check_shape(place.name, tensor.shape, (height, *self._shape[1:]))
        if self._values is None:
            self._values = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        own = self._values[place.part * height : (place.part + 1) * height]
        copier.put(tensor.whole(), own)

    def parameter(self) -> torch.nn.Parameter:
        """The whole, once it is full."""
        assert self._values is not None
        return torch.nn.Parameter(self._values, requires_grad=False)


def _files(model_dir: Path, prefixes: tuple[str, ...]) -> Iterator[TensorFile]:
    for path in weight_files(model_dir, wanted=lambda name: name.startswith(prefixes)):
        yield TensorFile(path)


def _tensors(files: list[TensorFile], prefixes: tuple[str, ...]) -> Iterator[StoredTensor]:
    """The tower's tensors as the checkpoint names them, each once."""
    for file in files:
        yield from (tensor for tensor in file.tensors() if tensor.name.startswith(prefixes))


def _check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """A convolution kernel that never overlaps is a matrix with its last dimensions flattened."""
    flat = (*found[:1], math.prod(found[1:]))
    if found != wanted and not (len(found) > len(wanted) and flat == wanted):
        raise ValueError(f"tensor {name} has shape {found}, the config says {wanted}")


def _check(model_dir: Path, missing: list[str], extra: list[str]) -> None:
    for what, names in (("lacks", missing), ("has unknown", extra)):
        if names:
            shown = ", ".join(sorted(names)[:_SHOWN_NAMES])
            more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
            raise ValueError(f"{model_dir} {what} tensors of the vision tower: {shown}{more}")
