"""What a vision tower is to the runner and the loader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from chiasm.plan import Grid
from encoder_svc.geometry import Geometry


@runtime_checkable
class _Finishes(Protocol):
    """A layer that keeps its weights otherwise than a checkpoint does."""

    def finish(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where a stored tensor goes: into a parameter, or an equal part of its first dimension."""

    name: str
    part: int = 0
    of: int = 1


class VisionTower(nn.Module, ABC):
    """Patches in, rows out. Built on the meta device; `encoder_svc.weights` fills it.

    Attributes:
        family: The name plans carry.
        prefixes: Checkpoint names of the tower's tensors begin with one of these.
        geometry: The cells it reads.
        hidden_size: Width of one level of a row.
        levels: Vectors of a row: 1 + deepstack features.
    """

    family: ClassVar[str]
    prefixes: ClassVar[tuple[str, ...]]
    geometry: Geometry
    hidden_size: int
    levels: int

    @classmethod
    @abstractmethod
    def from_config(cls, config: dict[str, Any]) -> VisionTower:
        """Builds the modules of a checkpoint's config.json. Raises ValueError naming the field."""

    @abstractmethod
    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Packed patches [sum of grid patches, patch values] to rows [rows, levels * hidden_size].

        No token attends beyond its own temporal group, so items of a batch do not mix.
        """

    @classmethod
    def place_of(cls, stored: str) -> Place | None:
        """Where a checkpoint's tensor of this name goes; None = nowhere, it is not the tower's."""
        for prefix in cls.prefixes:
            if stored.startswith(prefix):
                return Place(stored.removeprefix(prefix))
        return None

    @property
    def dtype(self) -> torch.dtype:
        """The one patches are rounded to before they are read."""
        return next(self.parameters()).dtype

    def wide_parameters(self) -> frozenset[str]:
        """Names of parameters a float16 tower keeps in float32 against overflow."""
        return frozenset()

    def finish(self) -> None:
        """Brings the weights into the order the forward wants, once they are in; before it runs."""
        for module in list(self.modules()):
            if module is not self and isinstance(module, _Finishes):
                module.finish()
