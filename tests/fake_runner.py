"""A runner without a tower, for tests of everything around it. Its rows tell the patches apart."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from chiasm.rows import RowFormat
from encoder_svc.geometry import Geometry
from encoder_svc.messages import RowBuffer
from encoder_svc.work import PreparedUnit, RunFailure

FAKE_GEOMETRY = Geometry(patch=14, temporal_patch=2, merge=2)


class BytesRows:
    """Rows in host memory. See `RowBuffer`."""

    region = None

    def __init__(self, data: bytes, num_rows: int) -> None:
        assert len(data) % num_rows == 0
        self._data = data
        self.num_rows = num_rows

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return len(self._data)

    def read(self, begin: int, end: int) -> memoryview:
        """Bytes of rows [begin, end)."""
        row = len(self._data) // self.num_rows
        return memoryview(self._data)[begin * row : end * row]


class FakeRunner:
    """Deterministic rows of float32: value c of a row is the mean of its patches plus c.

    Args:
        hidden_size: Width of a row.
        delay_s: Sleep of each forward.
        delay_per_patch_s: Added to it for each patch of the batch.
        verdict: Asked for each unit; a string fails the unit, an exception it raises the batch.
    """

    def __init__(
        self,
        *,
        hidden_size: int = 8,
        geometry: Geometry = FAKE_GEOMETRY,
        delay_s: float = 0.0,
        delay_per_patch_s: float = 0.0,
        verdict: Callable[[PreparedUnit], str | None] = lambda unit: None,
    ) -> None:
        self.family = "qwen2_5_vl"
        self.geometry = geometry
        self.row_format = RowFormat(hidden_size=hidden_size, levels=1, dtype="float32")
        self.batches: list[tuple[int, ...]] = []
        """Patches of each unit of every batch run so far."""
        self.may_run = threading.Event()
        """Clear it to hold forwards back."""
        self.may_run.set()
        self._delay_s = delay_s
        self._delay_per_patch_s = delay_per_patch_s
        self._verdict = verdict

    def run(
        self, batch: Sequence[PreparedUnit], *, segment_rows: int
    ) -> Sequence[tuple[RowBuffer, ...] | RunFailure]:
        """See `encoder_svc.work.Runner`."""
        self.may_run.wait()
        patches = sum(unit.grid.patches for unit in batch)
        time.sleep(self._delay_s + patches * self._delay_per_patch_s)
        self.batches.append(tuple(unit.grid.patches for unit in batch))
        return [self._one(unit, segment_rows) for unit in batch]

    def _one(self, unit: PreparedUnit, segment_rows: int) -> tuple[RowBuffer, ...] | RunFailure:
        if (message := self._verdict(unit)) is not None:
            return RunFailure(message)
        count = self.geometry.rows(unit.grid.patches)
        means = unit.patches.reshape(count, -1).mean(axis=1, keepdims=True)
        rows = (means + np.arange(self.row_format.hidden_size)).astype(np.float32)
        parts = [rows[at : at + segment_rows] for at in range(0, count, segment_rows)]
        return tuple(BytesRows(part.tobytes(), len(part)) for part in parts)
