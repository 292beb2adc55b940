"""What crosses the seams inside the encoder: prepared units on their way into a forward, and the
protocols of what makes them (`Preprocessor`) and what runs them (`Runner`). No torch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from chiasm.plan import Grid
from chiasm.rows import RowFormat
from encoder_svc.geometry import Geometry, Unit
from encoder_svc.messages import EncodeJob, RowBuffer
from encoder_svc.pixels.patches import Floats

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor


class DevicePatches(Protocol):
    """Patches on the tower's device; perhaps they are still being made there."""

    def ready(self) -> Tensor:
        """[patches, patch values], for use on the caller's current stream."""
        ...


class PatchMaker(Protocol):
    """Frames of one modality to patches. Any thread may call it."""

    def resize(self, frame: Image.Image, *, height: int, width: int) -> Any:
        """A frame of that size, or what will be one: only `patchify` looks into it."""
        ...

    def patchify(self, frames: Sequence[Any]) -> Floats | DevicePatches:
        """Patches of one or more temporal groups; a single frame fills its group."""
        ...


@dataclass(frozen=True, slots=True)
class PreparedUnit:
    """Patches of one unit, [grid.patches, patch values], in merge-window order.

    Float32 where they were made on the CPU.
    """

    patches: Floats | DevicePatches
    grid: Grid
    substituted_frames: int = 0


@dataclass(frozen=True, slots=True)
class RunFailure:
    """Why one unit of a batch has no rows; the others of the batch are not touched by it."""

    message: str


class Preprocessor(Protocol):
    """Makes patches. Called in pool threads, one thread at a time for each job."""

    @property
    def geometry(self) -> Geometry:
        """The cell sizes it cuts to."""
        ...

    def prepare(
        self, job: EncodeJob, units: Sequence[Unit], cancelled: threading.Event
    ) -> Iterator[PreparedUnit]:
        """Yields each unit in turn, working only when asked for the next.

        Raises ChiasmError: InvalidMedia or TooLarge for the file's own faults, Cancelled once
        `cancelled` is set.
        """
        ...


class Runner(Protocol):
    """Turns batches of patches into rows. Called from one thread only."""

    @property
    def family(self) -> str:
        """The family of plans the tower obeys."""
        ...

    @property
    def geometry(self) -> Geometry:
        """The cell sizes the tower reads."""
        ...

    @property
    def row_format(self) -> RowFormat:
        """What a row is."""
        ...

    def run(
        self, batch: Sequence[PreparedUnit], *, segment_rows: int
    ) -> Sequence[tuple[RowBuffer, ...] | RunFailure]:
        """Rows of each unit, in buffers of at most `segment_rows` rows, none shared between units.

        May raise for the batch as a whole; the caller then tries its units one by one.
        """
        ...
