"""Runs the vision tower: patches of a batch to rows of each unit. Mechanism only.

Lives in one thread of the engine. Knows nothing of jobs, queues or the network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch

from chiasm.rows import RowFormat
from encoder_svc.arena import TensorRows, keep_apart
from encoder_svc.geometry import Geometry
from encoder_svc.graphs import GraphedTower
from encoder_svc.messages import RowBuffer
from encoder_svc.models.base import VisionTower
from encoder_svc.weights import load_tower
from encoder_svc.work import PreparedUnit, RunFailure

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_GRAPHS = 16
MAX_GRAPH_PATCHES = 16384
"""Of a batch that is replayed as a graph: larger ones hide their launches, and keep much memory."""
NON_FINITE = "the vision tower made values that are not finite"


class TowerRunner:
    """A `Runner` over a `VisionTower`.

    Args:
        tower: Its weights are in place.
        row_dtype: Dtype of the rows that leave; wider rows are rounded once, at the end.
    """

    def __init__(self, tower: VisionTower, *, row_dtype: torch.dtype) -> None:
        self._tower = tower
        self.device = next(tower.parameters()).device
        self.dtype = tower.dtype
        self._row_dtype = row_dtype
        self._forward = (
            GraphedTower(tower, keep=_GRAPHS, max_patches=MAX_GRAPH_PATCHES)
            if self.device.type == "cuda"
            else tower
        )
        self.keep: Callable[[torch.Tensor], TensorRows] = keep_apart
        """Copies the rows of a segment to where they stay."""
        self.family: str = tower.family
        self.geometry: Geometry = tower.geometry
        self.row_format = RowFormat(
            hidden_size=tower.hidden_size,
            levels=tower.levels,
            dtype=str(row_dtype).removeprefix("torch."),
        )

    @classmethod
    def load(cls, model_dir: Path, *, device: str, dtype: str, row_dtype: str) -> TowerRunner:
        """Loads a checkpoint's tower; arguments as in `EncoderConfig`. Raises ValueError."""
        where = resolve_device(device)
        kind = resolve_dtype(dtype, where)
        leaving = kind if row_dtype == "auto" else resolve_dtype(row_dtype, where)
        return cls(load_tower(model_dir, device=where, dtype=kind), row_dtype=leaving)

    @torch.inference_mode()
    def run(
        self, batch: Sequence[PreparedUnit], *, segment_rows: int
    ) -> Sequence[tuple[RowBuffer, ...] | RunFailure]:
        """See `encoder_svc.work.Runner`."""
        # Which GPU is the current one is a matter of each thread, and kernels go by it.
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            return self._run(batch, segment_rows)

    def _run(
        self, batch: Sequence[PreparedUnit], segment_rows: int
    ) -> Sequence[tuple[RowBuffer, ...] | RunFailure]:
        # Copied even when there is one: how numpy aligned it must not show in the last bits.
        patches = torch.cat([self._to_device(unit) for unit in batch])
        rows = self._forward(patches, [unit.grid for unit in batch]).to(self._row_dtype)
        counts = [self.geometry.rows(unit.grid.patches) for unit in batch]
        assert rows.shape == (sum(counts), self.row_format.levels * self.row_format.hidden_size)
        buffers = [
            tuple(self.keep(segment) for segment in part.split(segment_rows))
            for part in rows.split(counts)
        ]
        # The one wait for the device: from here on the buffers may be read on any stream.
        finite = rows.isfinite().all(dim=1).to("cpu").split(counts)
        return [
            segments if bool(ok.all()) else RunFailure(NON_FINITE)
            for segments, ok in zip(buffers, finite, strict=True)
        ]

    def _to_device(self, unit: PreparedUnit) -> torch.Tensor:
        if not isinstance(unit.patches, np.ndarray):
            return unit.patches.ready()
        patches = torch.from_numpy(unit.patches)
        if self.device.type == "cuda":
            return patches.pin_memory().to(self.device, non_blocking=True)
        return patches


def resolve_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:N`. Raises ValueError for one that is not there.

    `auto:N`, worker N's share of the machine: `cuda:N` where there are GPUs, else `cpu`.
    """
    kind, _, index = name.partition(":")
    if kind == "auto":
        gpu = f"cuda:{index}" if index else "cuda"
        name = gpu if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name!r}: known are cpu, cuda, cuda:N and auto") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {name!r}: known are cpu, cuda, cuda:N and auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name!r}: this machine has {torch.cuda.device_count()} GPUs")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """A dtype by name; `auto` is bfloat16 on cuda and float32 on cpu. Raises ValueError."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in _DTYPES:
        raise ValueError(f"unknown dtype {name!r}; known: auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]
